"""A recipe is read with what it extends and the command line over it; every mistake is named with its cure."""

from __future__ import annotations

import importlib.resources
import warnings
from pathlib import Path

import pytest

from maxdiffusion.common_types import BlockSizes
from maxdiffusion.config.load import RUN_RECIPE, format_value, load_recipe, load_run, recipe_names
from maxdiffusion.errors import MaxDiffusionWarning, UsageError
from maxdiffusion.specs import MeshSpec


def _write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("name", sorted(recipe_names()))
def test_every_built_in_recipe_is_short_described_and_valid(name: str) -> None:
    text = (importlib.resources.files("maxdiffusion") / "recipes" / f"{name}.yaml").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 30
    assert recipe_names()[name].endswith(".")
    assert load_recipe(name).recipe.run == f"runs/{name}"


def test_the_demo_is_what_it_says() -> None:
    recipe = load_recipe("pictures-demo").recipe
    assert recipe.mesh_spec == MeshSpec(data=4, tensor=2)
    assert (recipe.data.concepts, recipe.data.size, recipe.virtual_devices) == ("demo-160", 32, 8)
    assert (recipe.diffusion.process, recipe.train.steps) == ("flow", 360)


def test_origins_say_where_each_value_was_set(tmp_path: Path) -> None:
    path = _write(tmp_path, "mine.yaml", "extends: pictures-demo\n\ntrain:\n  steps: 7\n")
    loaded = load_recipe(path, ["train.learning_rate=1e-4"])
    assert loaded.name == "mine"
    assert loaded.recipe.train.steps == 7
    assert loaded.recipe.train.learning_rate == 1e-4
    assert loaded.origins["train.steps"] == f"{path}:4"
    assert loaded.origins["train.learning_rate"] == "command line"
    assert loaded.origins["mesh.data"].startswith("pictures-demo.yaml:")
    assert loaded.origins["model"].startswith("pictures.yaml:")
    assert "train.beta1" not in loaded.origins


def test_extends_takes_a_path_beside_the_file(tmp_path: Path) -> None:
    _write(tmp_path, "base.yaml", "train:\n  steps: 5\n  batch_size: 8\n")
    (tmp_path / "more").mkdir()
    path = _write(tmp_path / "more", "child.yaml", "extends: ../base.yaml\ntrain: {batch_size: 16}\n")
    train = load_recipe(path).recipe.train
    assert (train.steps, train.batch_size) == (5, 16)


def test_extends_in_a_circle_is_an_error(tmp_path: Path) -> None:
    _write(tmp_path, "a.yaml", "extends: ./b.yaml\n")
    path = _write(tmp_path, "b.yaml", "extends: ./a.yaml\n")
    with pytest.raises(UsageError, match=r"circle: b.yaml -> a.yaml -> b.yaml"):
        load_recipe(path)


@pytest.mark.parametrize(
    ("words", "spec"),
    [
        (["mesh.data=2"], MeshSpec(data=2, tensor=2)),
        (["mesh=fsdp=8"], MeshSpec(fsdp=8)),
        (["mesh=data=4,tensor=2", "mesh.tensor=1"], MeshSpec(data=4, tensor=1)),
        (["mesh.tensor=1", "mesh=data=2"], MeshSpec(data=2)),
        (["mesh={data: 8}"], MeshSpec(data=8, tensor=2)),
        (["mesh=null"], MeshSpec()),
        (["mesh=tensor=2,dcn.data=2"], MeshSpec(tensor=2, dcn={"data": 2})),
        (["mesh.dcn.data=2"], MeshSpec(data=4, tensor=2, dcn={"data": 2})),
        (["mesh_axes=[data,model]", "mesh=data=4,model=2"], MeshSpec(axes=("data", "model"), data=4, model=2)),
    ],
)
def test_the_mesh_is_written_whole_or_axis_by_axis(words: list[str], spec: MeshSpec) -> None:
    assert load_recipe("pictures-demo", words).recipe.mesh_spec == spec


def test_values_of_the_command_line_are_yaml() -> None:
    words = [
        "data.styles=[fluent, flat]",
        'sample.prompts=["a cat, flat style", b]',
        "train.grad_clip=null",
        "model_config.channels=[64, 128]",
        "logical_axis_rules=[[embed, tensor], [mlp, null], [activation_batch, [data, fsdp]]]",
        "flash_block_sizes.block_q=128",
        "flash_block_sizes.block_k=64",
        "run=out: 1",
        "strict=true",
    ]
    recipe = load_recipe("pictures", words).recipe
    assert recipe.data.styles == ("fluent", "flat")
    assert recipe.sample.prompts == ("a cat, flat style", "b")
    assert recipe.train.grad_clip is None
    assert recipe.model_config == {"channels": (64, 128)}
    assert recipe.rules == (("embed", "tensor"), ("mlp", None), ("activation_batch", ("data", "fsdp")))
    assert recipe.flash_block_sizes == BlockSizes(block_q=128, block_k=64)
    assert recipe.run == "out: 1"
    assert recipe.strict


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("train.lerning_rate=1", "train.lerning_rate (command line) is unknown: did you mean 'train.learning_rate'?"),
        ("learning_rate=1", "learning_rate (command line) is unknown: did you mean 'train.learning_rate'?"),
        ("lr=1", "lr (command line) is unknown: did you mean 'train.learning_rate'?"),
        ("batch=1", "batch (command line) is unknown: did you mean 'train.batch_size'?"),
        ("trian.steps=1", "trian.steps (command line) is unknown: did you mean 'train.steps'?"),
        (
            "train.guidance_scale=1",
            "train.guidance_scale (command line) is unknown: did you mean 'sample.guidance_scale'?",
        ),
        ("mesh.tensro=2", "mesh.tensro (command line) is unknown: did you mean 'mesh.tensor'?"),
        (
            "mesh=data=4,model=2",
            "mesh.model (command line) is unknown: valid: mesh.stage, mesh.data, mesh.fsdp, mesh.cfg, mesh.context, "
            "mesh.tensor (or name other axes: mesh_axes=[data,model])",
        ),
        ("mesh=data=4,tensro=2", "mesh.tensro (command line) is unknown: did you mean 'mesh.tensor'?"),
        ("model=pctures", "model='pctures' (command line): did you mean 'pictures'?"),
        ("sample.solver=eulr", "sample.solver='eulr' (command line): did you mean 'euler'?"),
        ("remat_policy=zzz", "remat_policy='zzz' (command line): valid: full, minimal, none, offload"),
        (
            "remat_save=atention",
            "remat_save (command line): remat_save='atention' is unknown: did you mean 'attention'?",
        ),
        ("remat_save=3", "remat_save=3 (command line): write names, such as [attention, hidden]"),
        ("train.steps=many", "train.steps='many' (command line): write a whole number, 1 or more"),
        ("train.steps=0", "train.steps=0 (command line): write a whole number, 1 or more"),
        ("train.grad_clip=-1", "train.grad_clip=-1 (command line): write a number above 0 (or null)"),
        ("data.styles=flat", "data.styles='flat' (command line): write a list: [flat] (or null)"),
        ("strict=yes", "strict='yes' (command line): write true or false"),
        ("mesh.data=x", "mesh.data='x' (command line): write sizes of mesh axes such as data=4,tensor=2"),
        ("mesh.dcn.data=x", "mesh.dcn.data='x' (command line): write sizes of mesh axes such as data=4,tensor=2"),
        ("mesh=3", "mesh=3 (command line): it holds names; write for example mesh=data=4,tensor=2"),
        ("train=3", "train=3 (command line): it holds names; write for example train.steps=VALUE"),
        ("data.source=folder", "data.path: source=folder needs the folder: write data.path=FOLDER"),
        ("data.source=webdatset", "data.source='webdatset' (command line): did you mean 'webdataset'?"),
        (
            "data.buckets=aspect",
            "data.buckets (command line): the built-in pictures are all square: leave data.buckets out",
        ),
        ("logical_axis_rules=fdsp", "logical_axis_rules (command line): 'fdsp' is no preset: did you mean 'fsdp'?"),
        ("train.steps", "'train.steps' is not key=value: write for example train.steps=100"),
    ],
)
def test_a_mistake_is_one_line_with_its_cure(word: str, line: str) -> None:
    with pytest.raises(UsageError) as error:
        load_recipe("pictures", [word])
    assert str(error.value) == line


def test_a_mesh_error_names_the_axis_and_the_origins() -> None:
    with pytest.raises(UsageError, match=r"^mesh \(command line\): mesh axes data and tensor are both -1"):
        load_recipe("pictures-demo", ["mesh.data=-1", "mesh.tensor=-1"])


def test_an_axis_that_the_mesh_axes_lack_is_named_with_its_file() -> None:
    with pytest.raises(
        UsageError, match=r"mesh.tensor \(pictures-demo.yaml:\d+\) is unknown: valid: mesh.data, mesh.mod"
    ):
        load_recipe("pictures-demo", ["mesh_axes=[data,model]"])


def test_quantization_that_cannot_work_is_refused_by_its_key() -> None:
    for word, told in (
        ("quantization=int9", "quantization"),
        ("use_qwix_quantization=true", "use_qwix_quantization=True says too little"),
        ("act_quantization_calibration_method=rms,7", "is of no use without quantization"),
    ):
        with pytest.raises(UsageError, match=told) as error:
            load_recipe("pictures", [word])
        assert str(error.value).startswith(word.partition("=")[0])


def test_all_mistakes_come_together() -> None:
    words = ["learning_rate=1", "train.steps=many", "train.batch_size=0", "sample.solver=eulr", "nonsense", "mesh=3"]
    with pytest.raises(UsageError) as error:
        load_recipe("pictures", words)
    lines = str(error.value).splitlines()
    assert len(lines) == len(words)
    assert all(any(word.partition("=")[0] in line for line in lines) for word in words)


def test_a_mistake_in_a_file_is_named_by_line(tmp_path: Path) -> None:
    path = _write(tmp_path, "mine.yaml", "model: pictures\ntrain:\n  steps: few\n  lerning_rate: 1\n")
    with pytest.raises(UsageError) as error:
        load_recipe(path)
    assert f"train.lerning_rate ({path}:4) is unknown" in str(error.value)
    assert f"train.steps='few' ({path}:3)" in str(error.value)


def test_a_key_given_twice_in_two_forms_is_an_error(tmp_path: Path) -> None:
    path = _write(tmp_path, "mine.yaml", "train:\n  steps: 1\ntrain.steps: 2\n")
    with pytest.raises(UsageError, match=r"mine.yaml:3: 'train.steps' is given twice \(first at .*mine.yaml:2\)"):
        load_recipe(path)


@pytest.mark.parametrize(("text", "match"), [("- a\n", "mapping"), ("extends: 3\n", "extends=3"), ("a: [\n", "YAML")])
def test_a_file_that_is_no_recipe_is_an_error(tmp_path: Path, text: str, match: str) -> None:
    with pytest.raises(UsageError, match=match):
        load_recipe(_write(tmp_path, "mine.yaml", text))


def test_an_empty_file_or_section_is_all_defaults(tmp_path: Path) -> None:
    assert load_recipe(_write(tmp_path, "empty.yaml", "")).origins == {}
    assert load_recipe(_write(tmp_path, "section.yaml", "train:\n  # steps: 3\n")).recipe.train.steps == 1000


def test_an_unreadable_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "bytes.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="cannot be read"):
        load_recipe(path)


@pytest.mark.parametrize(
    ("source", "match"),
    [
        ("picturs", "did you mean 'pictures'"),
        ("./none.yaml", "there is no file"),
        (".", "is unknown"),
        ("./", "a folder"),
    ],
)
def test_an_unknown_recipe_is_an_error(source: str, match: str) -> None:
    with pytest.raises(UsageError, match=match):
        load_recipe(source)


def test_a_run_is_read_back_and_a_missing_one_gets_the_nearest_name(tmp_path: Path) -> None:
    run = tmp_path / "pictures-demo"
    run.mkdir()
    with pytest.raises(UsageError, match="is no run"):
        load_run(run)
    _write(run, RUN_RECIPE, "train:\n  steps: 9\n")
    loaded = load_run(run, ["sample.steps=3"])
    assert (loaded.name, loaded.recipe.train.steps, loaded.recipe.sample.steps) == ("pictures-demo", 9, 3)
    with pytest.raises(UsageError, match="did you mean 'pictures-demo'"):
        load_run(tmp_path / "picture-demo")
    with pytest.raises(UsageError, match="train one first"):
        load_run(tmp_path / "nowhere" / "x")


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "null"), (True, "true"), (1e-4, "0.0001"), (("a, b", "c"), '["a, b", c]'), ({"a": (1,)}, "{a: [1]}")],
)
def test_values_are_shown_as_they_are_written(value: object, text: str) -> None:
    assert format_value(value) == text


def test_values_of_an_older_run_that_do_nothing_are_left_out(tmp_path: Path) -> None:
    """They were written before they were refused; what the command line says is refused as ever."""
    text = "data: {source: folder, path: here, styles: [noto], bucket_step: 32}\ntrain: {decay_steps: 5, steps: 9}\n"
    (tmp_path / "recipe.yaml").write_text(text)
    with pytest.warns(MaxDiffusionWarning) as warned:
        recipe = load_run(tmp_path, ["train.steps=8"]).recipe
    assert (recipe.data.styles, recipe.data.bucket_step, recipe.train.decay_steps) == (None, 16, None)
    assert (recipe.data.path, recipe.train.steps) == ("here", 8)
    said = [str(warning.message) for warning in warned]
    file = tmp_path / "recipe.yaml"
    assert f"data.styles=[noto] ({file}:1) does nothing there and is left out" in said and len(said) == 3
    with (
        pytest.warns(MaxDiffusionWarning),
        pytest.raises(UsageError, match=r"data.concepts \(command line\): source=folder has no use for it: write"),
    ):
        load_run(tmp_path, ["data.concepts=[fox]"])
    (tmp_path / "recipe.yaml").write_text("train: {decay_steps: 5, stops: 9}\n")
    with pytest.raises(UsageError, match=r"train\.stops .* is unknown: did you mean 'train\.steps'"):
        load_run(tmp_path)


@pytest.mark.parametrize(
    ("mode", "kept"),
    [("null", []), ("int4", ["weight"]), ("fp8", ["act", "weight"]), ("fp8_full", ["act", "bwd", "weight"])],
)
def test_another_mode_leaves_out_what_it_has_no_use_for(mode: str, kept: list[str], tmp_path: Path) -> None:
    """Of the run's recipe; what the command line says is refused as ever."""
    key = "{}_quantization_calibration_method".format
    of_run = {key("weight"): "absmax,0.9", key("act"): "absmax,0.8", key("bwd"): "rms,7", "quantization": "fp8_full"}
    lines = [f'{name}: "{value}"' for name, value in of_run.items()]
    (tmp_path / "recipe.yaml").write_text("\n".join([*lines, "sample: {precise_first_steps: 1}"]) + "\n")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        recipe = load_run(tmp_path, [f"quantization={mode}"]).recipe
    changed = [name for name in ("act", "bwd", "weight") if getattr(recipe, key(name)) != "absmax"]
    assert changed == kept and recipe.quantization == (None if mode == "null" else mode)
    assert recipe.sample.precise_first_steps == (mode not in ("null", "int4"))
    gone = 3 - len(kept) + (mode in ("null", "int4"))
    assert len([one for one in said if "is of no use with quantization=" in str(one.message)]) == gone
    with (
        pytest.warns(MaxDiffusionWarning, match="is left out"),
        pytest.raises(UsageError, match="is of no use without quantization"),
    ):
        load_run(tmp_path, ["quantization=null", f"{key('act')}=rms,7"])
