"""`train(recipe)`: builds the mesh, the model, the data and the loop of a recipe, and runs it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from maxdiffusion.config.load import load_recipe
from maxdiffusion.config.schema import Recipe
from maxdiffusion.data.fingerprint import Fingerprint
from maxdiffusion.data.pictures import Pictures
from maxdiffusion.data.prompts import unknown_in_captions, unknown_words
from maxdiffusion.data.source import Source
from maxdiffusion.data.tokenizer import WordTokenizer
from maxdiffusion.errors import INTERRUPTED, UsageError
from maxdiffusion.nn.model import float_dtype
from maxdiffusion.parallel.mesh import build_mesh, describe
from maxdiffusion.parallel.multihost import HOST_TIMEOUT, connections
from maxdiffusion.parallel.replicas import replica_checksums
from maxdiffusion.paths import as_path
from maxdiffusion.pipelines.run_files import METRICS, SAMPLES
from maxdiffusion.pipelines.run_folder import TOKENIZER
from maxdiffusion.pipelines.text_to_image import TextToImage, sampler, styles_in, text_to_image_of
from maxdiffusion.train.agreement import agree, setup_facts, share_folder, weight_facts
from maxdiffusion.train.checkpoint import Checkpoints, check_data, open_run, write_run
from maxdiffusion.train.diverged import Rescue
from maxdiffusion.train.feed import (
    built_in,
    captions_of,
    learn_words,
    make_feed,
    measured_source,
    reading_threads,
    training_source,
)
from maxdiffusion.train.held_out import HeldOutLoss
from maxdiffusion.train.likeness import Likeness
from maxdiffusion.train.loop import Loop
from maxdiffusion.train.manifest import RunFacts
from maxdiffusion.train.meter import make_meter
from maxdiffusion.train.metrics import MetricsFile
from maxdiffusion.train.optim import optimizer
from maxdiffusion.train.owed import owed_at
from maxdiffusion.train.profile import PROFILE, Profiler, check_span, past
from maxdiffusion.train.progress import Reporter
from maxdiffusion.train.report import write_report
from maxdiffusion.train.samples import SampleGrid
from maxdiffusion.train.sizes import buckets_of, check_sizes, compile_sizes, image_shapes, told
from maxdiffusion.train.start import Start, open_start, started_from
from maxdiffusion.train.state import TrainState, initial_state, sampling_weights, state_shapes
from maxdiffusion.train.step import Objective, objective_of, train_step
from maxdiffusion.train.trackers import Audience, check_trackers, open_trackers
from maxdiffusion.train.watchdog import Watchdog


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """What a training did.

    Attributes:
        run: folder of the run.
        step: optimizer steps done, in earlier parts of the run too.
        loss: mean over about the last 50 steps.
        images_per_second: over all devices, compilation left out.
        training_seconds: spent in steps.
        compile_seconds: spent compiling the step.
        total_seconds: from the recipe to the last checkpoint.
        samples: newest grid of pictures; None where none was drawn.
        interrupted: whether Ctrl-C or SIGTERM stopped it before its last step.
    """

    run: Path
    step: int
    loss: float
    images_per_second: float
    training_seconds: float
    compile_seconds: float
    total_seconds: float
    samples: Path | None
    interrupted: bool


def train(recipe: Recipe | str, *, resume: bool | None = None, host_timeout: float = HOST_TIMEOUT) -> TrainResult:
    """Trains what a recipe describes; the weights, metrics and pictures go to the run's folder.

    Args:
        recipe: the values, or the name of a recipe.
        resume: go on from the newest checkpoint of the run's folder; None does what the recipe says.
        host_timeout: with several hosts, seconds without a sign of life after which one counts as gone.

    Returns:
        Figures and places; the run can be used by `generate` and `evaluate`.

    Raises:
        UsageError: something in the recipe cannot work, or the folder holds another run.
        DivergedError: a loss or a gradient is no longer finite.
        DisagreementError: hosts would train different things.
        HostGoneError: another host is gone.
    """
    recipe = load_recipe(recipe).recipe if isinstance(recipe, str) else recipe
    with Watchdog(seconds=recipe.train.watchdog_seconds, host_seconds=host_timeout) as watch:
        return _train(recipe, resume=resume, watch=watch)


def _train(recipe: Recipe, *, resume: bool | None, watch: Watchdog) -> TrainResult:
    began = time.perf_counter()
    reporter = Reporter()
    folder, done, start = _open(recipe, resume=recipe.resume if resume is None else resume)
    mesh = build_mesh(recipe.mesh_spec)
    source = training_source(recipe.data)
    held_out = measured_source(recipe.data, eval_every=recipe.train.eval_every)
    samples = Fingerprint.of(source)
    _meet(watch, recipe, mesh=mesh, samples=samples, folder=folder, done=done, start=start)
    changed = bool(done) and check_data(folder, done, samples, allowed=recipe.train.resume_changes)
    tokenizer = _old_words(folder, source, changed=changed) if done else _words(source, start)
    subject = text_to_image_of(recipe, mesh=mesh, vocab_size=tokenizer.vocab_size, max_length=tokenizer.max_length)
    if start:
        start.check(recipe, subject.model)
    section, rule, layout = recipe.train, optimizer(recipe.train, subject.model), subject.layout
    feed = make_feed(layout, tokenizer, batch_size=section.batch_size, data_sharding=recipe.data_sharding)
    shapes = state_shapes(
        subject.model,
        rule,
        keeps_ema=section.ema_decay > 0,
        master_dtype=float_dtype(section.master_dtype, "master_dtype"),
    )
    objective = objective_of(recipe, subject, tokenizer)
    images = image_shapes(source)
    check_sizes(subject.model, images, recipe.data)
    sized = [feed.shapes(section.batch_size, shape) for shape in images]
    step = train_step(
        objective,
        rule,
        shapes=shapes,
        examples=sized[0],
        ema_decay=section.ema_decay,
        accumulation_steps=section.accumulation_steps,
        rounding=section.rounding,
    )
    for examples in sized:  # what no step can be traced with is refused before anything is written
        step.eval_shape(shapes, examples)  # type: ignore[attr-defined]
    grid = _grid(recipe, subject, tokenizer, source)
    stream = feed.batches(source, seed=recipe.seed, buckets=buckets_of(source))
    sizes = tuple(image[:2] for image in images)
    facts = RunFacts(
        recipe=recipe,
        layout=layout,
        tokenizer=tokenizer,
        batches=stream,
        sizes=sizes,
        samples=samples,
        started_from=started_from(folder, done) if done else start and start.told,
    )
    weights = None if start is None else _weights(start, subject, reporter)
    if not done:
        write_run(folder, recipe, tokenizer)
    checkpoints = Checkpoints(folder, keep=section.keep_checkpoints, keep_every=section.keep_every, facts=facts)
    reporter.say(
        f"run {folder}: {len(source)} pictures of {_sizes(source)}, "
        f"{_count(shapes) / 1e6:.1f} M parameters, mesh {describe(mesh)}"
    )
    _say_more(reporter, recipe, source, done=done, changed=changed)
    with reporter.phase(f"reading step {done}" if done else "making the weights"):
        state = (
            checkpoints.restore(done, shapes, allowed=section.resume_changes)
            if done
            else initial_state(subject.model, rule, shapes, seed=recipe.seed, params=weights)
        )
    del weights
    if done:  # the run's files stay as they are until it is sure that the run goes on
        write_run(folder, recipe, tokenizer)
    with contextlib.ExitStack() as ends:  # all of them, the last first, whatever one of them raises
        ends.callback(checkpoints.close)
        audience = ends.enter_context(Audience(open_trackers(recipe, folder, resume_step=done)))
        trackers = audience.trackers
        grid = dataclasses.replace(grid, trackers=trackers)
        metrics = MetricsFile(folder / METRICS, resume_step=done, trackers=trackers)
        ends.callback(metrics.flush)
        if watch.board is not None:
            agree(watch.board, "weights", weight_facts(replica_checksums(state.params)))
        compiling = time.perf_counter()
        with reporter.phase("compiling the training step" + (f" for {len(images)} sizes" if len(images) > 1 else "")):
            compiled = compile_sizes(step, shapes, feed, batch_size=section.batch_size, images=images)
        compile_seconds = time.perf_counter() - compiling
        pictures: list[Path] = []

        def draw(state: TrainState) -> None:
            number = int(state.step)
            with reporter.phase(f"samples of step {number}"):
                pictures.append(grid.draw(sampling_weights(state), folder / SAMPLES / f"step-{number:06}.png", number))

        measure = None if held_out is None else _evaluation(recipe, objective, tokenizer, held_out, reporter)
        loop = Loop(
            section=section,
            step=compiled,
            batches=stream,
            feed=feed,
            reporter=reporter,
            metrics=metrics,
            checkpoints=checkpoints,
            on_sample=draw,
            on_evaluate=measure,
            on_report=functools.partial(_report, folder, reporter),
            profiler=Profiler(recipe.profile.span, folder / PROFILE),
            meter=make_meter(objective, shapes, sized, list(compiled.programs.values()), peak=recipe.track.peak_tflops),
            rescue=Rescue(folder=folder, objective=objective, section=section, facts=facts),
            owed=owed_at(done, section, folder),
            num_threads=reading_threads(recipe.data),
            watch=watch,
        )
        outcome = loop.run(state)
        audience.status = INTERRUPTED if outcome.interrupted else 0
    return TrainResult(
        run=folder,
        step=int(outcome.state.step),
        loss=outcome.loss,
        images_per_second=outcome.images / outcome.seconds if outcome.seconds else 0.0,
        training_seconds=outcome.seconds,
        compile_seconds=compile_seconds,
        total_seconds=time.perf_counter() - began,
        samples=pictures[-1] if pictures else None,
        interrupted=outcome.interrupted,
    )


def _open(recipe: Recipe, *, resume: bool) -> tuple[Path, int, Start | None]:
    """The run's folder, the step to go on from, and what a new run starts from; refuses what cannot work.

    Raises:
        UsageError: something in the recipe, or in the folder.
    """
    if recipe.pipeline_patches:
        raise UsageError(
            f"pipeline_patches={recipe.pipeline_patches} approximates steps of sampling and cannot train: leave it out"
        )
    place = as_path(recipe.run or f"runs/{recipe.model}")
    check_trackers(recipe.track, place)
    check_span(recipe.profile.span, steps=recipe.train.steps, folder=place)
    folder, done = open_run(recipe, resume=resume)
    begins = recipe.train.start_from
    return folder, done, None if done or begins is None else open_start(begins)


def _say_more(reporter: Reporter, recipe: Recipe, source: Source, *, done: int, changed: bool) -> None:
    """What is worth knowing of the data and the profile before the first step."""
    for line in [*told(source, recipe.train.batch_size), *filter(None, [past(recipe.profile.span, done=done)])]:
        reporter.say(line)
    if changed:
        reporter.say(f"data: other samples than until step {done}: go on with them at the place that the step says")


def _old_words(folder: Path, source: Source, *, changed: bool) -> WordTokenizer:
    """The words of a run that goes on."""
    tokenizer = WordTokenizer.load(folder / TOKENIZER)
    if changed:
        tokenizer.encode(captions_of(source))  # refuses a caption that is too long for the model
    return tokenizer


def _words(source: Source, start: Start | None) -> WordTokenizer:
    """The words of the captions, or those that the first weights know."""
    if start is None:
        return learn_words(captions_of(source))
    captions = captions_of(source)
    start.tokenizer.encode(captions)  # refuses a caption that is too long for the model
    unknown_in_captions(start.tokenizer, captions, f"train.start_from={start.place}")
    return start.tokenizer


def _weights(start: Start, subject: TextToImage, reporter: Reporter) -> Any:
    with reporter.phase(f"reading the weights of {start.place}, step {start.step}"):
        return start.weights(subject.model)


def _meet(
    watch: Watchdog,
    recipe: Recipe,
    *,
    mesh: Mesh,
    samples: Fingerprint,
    folder: Path,
    done: int,
    start: Start | None,
) -> None:
    """Several hosts see that they share the folder and that all are set up alike, and connect to each other."""
    if watch.board is None:
        return
    share_folder(watch.board, folder)
    facts = setup_facts(recipe, mesh=mesh, samples=samples, done=done)
    weights = {} if start is None else {"first weights": f"step {start.step}, {start.mark}"}
    agree(watch.board, "set-up", {**facts, **weights})
    connect = connections(mesh)
    agree(watch.board, "connections", {})  # all have compiled it
    connect()


def _report(folder: Path, reporter: Reporter) -> None:
    """Writes the page about a run, on the first host. Training goes on without one."""
    if jax.process_index():
        return
    try:
        write_report(folder)
    except Exception as error:  # noqa: BLE001  a page about a run must not end the run
        reporter.say(
            f"the report is not up to date: {type(error).__name__}: {error}; try `maxdiffusion report {folder}`"
        )


def _evaluation(
    recipe: Recipe, objective: Objective, tokenizer: WordTokenizer, held_out: Pictures, reporter: Reporter
) -> Callable[[TrainState], dict[str, float | list[float]]]:
    """Measures a state on held-out pairs, as the recipe says."""
    losses = HeldOutLoss(objective, tokenizer, held_out, seed=recipe.seed)
    painted = recipe.train.eval_pictures
    likeness = painted and Likeness(
        objective.text_to_image,
        tokenizer,
        held_out=held_out,
        training=built_in(recipe.data, "train"),
        section=recipe.sample,
        num_seeds=painted,
    )

    def measure(state: TrainState) -> dict[str, float | list[float]]:
        weights = sampling_weights(state)
        with reporter.phase(f"held-out losses of step {int(state.step)}"):
            found = losses(weights).as_metrics()
        if likeness:
            with reporter.phase(f"pictures for {len(likeness.targets)} held-out captions"):
                found |= likeness(weights).as_metrics()
        return found

    return measure


def _grid(recipe: Recipe, subject: TextToImage, tokenizer: WordTokenizer, source: Source) -> SampleGrid:
    """The grid of the recipe's prompts, or of the first captions where it has none.

    Raises:
        UsageError: a prompt is too long.

    Warns:
        MaxDiffusionWarning: a prompt has words that were in no caption.
    """
    captions = [source[index].caption for index in range(min(4, len(source)))]
    prompts = recipe.sample.prompts or tuple(dict.fromkeys(captions))
    try:
        tokenizer.encode(prompts)
    except UsageError as error:
        raise UsageError(f"sample.prompts: {error}") from error
    unknown_words(tokenizer, prompts, styles_in(recipe.data))
    return SampleGrid(
        sampler=sampler(subject, recipe.sample), tokenizer=tokenizer, prompts=prompts, section=recipe.sample
    )


def _sizes(source: Source) -> str:
    sizes = [f"{height} x {width}" for height, width, _ in image_shapes(source)]
    return sizes[0] if len(sizes) == 1 else f"{len(sizes)} sizes"


def _count(shapes: TrainState) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(shapes.params))
