"""What a UNet is: the keywords of diffusers' `config.json`, checked, and the sizes of each level drawn from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from maxdiffusion.errors import UsageError, nearest
from maxdiffusion.nn.activations import activation

Value = TypeVar("Value")

DOWN_BLOCKS = ("DownBlock2D", "CrossAttnDownBlock2D")
UP_BLOCKS = ("UpBlock2D", "CrossAttnUpBlock2D")
MID_BLOCKS = ("UNetMidBlock2DCrossAttn", "UNetMidBlock2D")

NEUTRAL: dict[str, Any] = {
    "attention_type": "default",
    "class_embeddings_concat": False,
    "cross_attention_norm": None,
    "downsample_padding": 1,
    "dropout": 0.0,
    "dual_cross_attention": False,
    "encoder_hid_dim": None,
    "encoder_hid_dim_type": None,
    "mid_block_scale_factor": 1.0,
    "resnet_out_scale_factor": 1.0,
    "resnet_skip_time_act": False,
    "time_cond_proj_dim": None,
    "time_embedding_act_fn": None,
    "time_embedding_type": "positional",
    "timestep_post_act": None,
}
"""Keywords of other UNets that are understood at this one value, which changes nothing, and refused at any other."""


@dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """One level of the UNet.

    Attributes:
        channels: of the level.
        num_resnets: residual blocks of convolutions.
        num_heads: of attention; the head's width is `channels // num_heads`.
        num_transformers: transformer blocks after each residual block; 0 for a level without attention.
        only_cross: the first attention of each transformer block reads the text too, instead of the picture.
        num_groups: of the group norms.
        epsilon: of the group norms in residual blocks.
        act_fn: name of the activation.
        scale_shift: the time embedding scales and shifts (after the second norm) instead of being added.
        resample: the level ends with a halving (on the way down) or a doubling (on the way up).
    """

    channels: int
    num_resnets: int
    num_heads: int
    num_transformers: int
    only_cross: bool
    num_groups: int
    epsilon: float
    act_fn: str
    scale_shift: bool
    resample: bool


@dataclass(kw_only=True)
class UNetKeywords:
    """The keywords of diffusers' `UNet2DConditionModel` that describe the network.

    The defaults are Stable Diffusion 1.5: those of diffusers, but for `cross_attention_dim` (768, not 1280) and
    `sample_size` (64). Sequences may be lists or tuples; where a single value is allowed it serves every level.

    Attributes:
        sample_size: height and width of the latents that the model was made for; any size can be run.
        in_channels, out_channels: of the latents and of the result.
        center_input_sample: the input is in [0, 1] and is mapped to [-1, 1].
        flip_sin_to_cos, freq_shift: form of the timestep sinusoids.
        down_block_types, mid_block_type, up_block_types: `CrossAttn...` levels have attention, others do not.
        only_cross_attention: the first attention of a block reads the text too; one value, or one a level (never
            the middle).
        block_out_channels: channels of each level.
        layers_per_block: residual blocks of each level on the way down (one more on the way up).
        act_fn: name of the activation.
        norm_num_groups, norm_eps: of the group norms.
        cross_attention_dim: width of the text states.
        transformer_layers_per_block: transformer blocks after each residual block; one value, or one a level.
        reverse_transformer_layers_per_block: the same for the way up, where it is not the reverse.
        attention_head_dim: despite its name the NUMBER of heads of each level, when `num_attention_heads` is None
            (the files of every Stable Diffusion say it so); otherwise the width of a head.
        num_attention_heads: the number of heads, by its right name.
        use_linear_projection: the projections around the transformers are stored as matrices and not as 1x1
            convolutions; the numbers are the same, and so are the parameters here.
        class_embed_type: None (a table, if `num_class_embeds`), `timestep`, `identity`, `projection` or
            `simple_projection`.
        num_class_embeds: rows of the class table.
        addition_embed_type: None or `text_time` (pooled text and size conditions of SDXL).
        addition_time_embed_dim: width of the sinusoids of each size condition.
        addition_embed_type_num_heads: of no use to `text_time`.
        projection_class_embeddings_input_dim: width of the pooled text and all size conditions together, or of the
            class vector for `class_embed_type="projection"`.
        upcast_attention: scores in float32; here they always are.
        resnet_time_scale_shift: `default` (added) or `scale_shift`.
        time_embedding_dim: width of the time embedding; None for four times the first level.
        conv_in_kernel, conv_out_kernel: sizes of the outer convolutions.
        mid_block_only_cross_attention: not supported; the middle reads the picture and the text.
        attention_type ... timestep_post_act: see `NEUTRAL`.

    Raises:
        UsageError: at construction, for a value that is not supported or does not fit the others.
    """

    sample_size: int | Sequence[int] | None = 64
    in_channels: int = 4
    out_channels: int = 4
    center_input_sample: bool = False
    flip_sin_to_cos: bool = True
    freq_shift: float = 0
    down_block_types: Sequence[str] = (*("CrossAttnDownBlock2D",) * 3, "DownBlock2D")
    mid_block_type: str | None = "UNetMidBlock2DCrossAttn"
    up_block_types: Sequence[str] = ("UpBlock2D", *("CrossAttnUpBlock2D",) * 3)
    only_cross_attention: bool | Sequence[bool] = False
    block_out_channels: Sequence[int] = (320, 640, 1280, 1280)
    layers_per_block: int | Sequence[int] = 2
    act_fn: str = "silu"
    norm_num_groups: int = 32
    norm_eps: float = 1e-5
    cross_attention_dim: int | Sequence[int] = 768
    transformer_layers_per_block: int | Sequence[int] = 1
    reverse_transformer_layers_per_block: Sequence[int] | None = None
    attention_head_dim: int | Sequence[int] = 8
    num_attention_heads: int | Sequence[int] | None = None
    use_linear_projection: bool = False
    class_embed_type: str | None = None
    num_class_embeds: int | None = None
    addition_embed_type: str | None = None
    addition_time_embed_dim: int | None = None
    addition_embed_type_num_heads: int = 64
    projection_class_embeddings_input_dim: int | None = None
    upcast_attention: bool | None = False
    resnet_time_scale_shift: str = "default"
    time_embedding_dim: int | None = None
    conv_in_kernel: int = 3
    conv_out_kernel: int = 3
    mid_block_only_cross_attention: bool | None = None
    attention_type: str = "default"
    class_embeddings_concat: bool = False
    cross_attention_norm: str | None = None
    downsample_padding: int = 1
    dropout: float = 0.0
    dual_cross_attention: bool = False
    encoder_hid_dim: int | None = None
    encoder_hid_dim_type: str | None = None
    mid_block_scale_factor: float = 1.0
    resnet_out_scale_factor: float = 1.0
    resnet_skip_time_act: bool = False
    time_cond_proj_dim: int | None = None
    time_embedding_act_fn: str | None = None
    time_embedding_type: str = "positional"
    timestep_post_act: str | None = None

    @property
    def num_levels(self) -> int:
        """Number of resolutions."""
        return len(self.block_out_channels)

    @property
    def time_width(self) -> int:
        """Width of the time embedding."""
        return self.time_embedding_dim or 4 * self.block_out_channels[0]

    @property
    def reads_text(self) -> bool:
        """Whether any level has attention."""
        return any(config.num_transformers for config in (*self.down_levels(), self.mid_level()))

    @property
    def text_width(self) -> int:
        """Width of the text states; one width, since every level reads the same states."""
        widths = self._each_level("cross_attention_dim")
        return widths[0]

    def down_levels(self) -> tuple[BlockConfig, ...]:
        """The levels on the way down, finest first."""
        resnets = self._each_level("layers_per_block")
        transformers = self._each_level("transformer_layers_per_block")
        return tuple(
            self._block(level, kind, resnets[level], transformers[level], level < self.num_levels - 1)
            for level, kind in enumerate(self.down_block_types)
        )

    def mid_level(self) -> BlockConfig:
        """The middle, at the coarsest resolution; `num_resnets` is 0 without one."""
        kind = self.mid_block_type or ""
        attends = kind == "UNetMidBlock2DCrossAttn"
        depth = self._each_level("transformer_layers_per_block")[-1]
        return self._block(self.num_levels - 1, kind, 2 if attends else int(bool(kind)), depth, False)

    def up_levels(self) -> tuple[BlockConfig, ...]:
        """The levels on the way up, coarsest first."""
        resnets = self._each_level("layers_per_block")[::-1]
        transformers = self._each_level("transformer_layers_per_block")[::-1]
        if self.reverse_transformer_layers_per_block is not None:
            transformers = tuple(self.reverse_transformer_layers_per_block)
        last = self.num_levels - 1
        return tuple(
            self._block(last - place, kind, resnets[place] + 1, transformers[place], place < last)
            for place, kind in enumerate(self.up_block_types)
        )

    def _block(self, level: int, kind: str, num_resnets: int, depth: int, resample: bool) -> BlockConfig:
        return BlockConfig(
            channels=self.block_out_channels[level],
            num_resnets=num_resnets,
            num_heads=self._heads()[level],
            num_transformers=depth if "CrossAttn" in kind else 0,
            only_cross=kind in (*DOWN_BLOCKS, *UP_BLOCKS) and self._each_level("only_cross_attention")[level],
            num_groups=self.norm_num_groups,
            epsilon=self.norm_eps,
            act_fn=self.act_fn,
            scale_shift=self.resnet_time_scale_shift == "scale_shift",
            resample=resample,
        )

    def _heads(self) -> tuple[int, ...]:
        return self._each_level("attention_head_dim" if self.num_attention_heads is None else "num_attention_heads")

    def _each_level(self, name: str) -> tuple[Any, ...]:
        value = getattr(self, name)
        values = tuple(value) if isinstance(value, Sequence) else (value,) * self.num_levels
        if len(values) != self.num_levels:
            raise UsageError(
                f"{name} has {len(values)} entries for {self.num_levels} levels of block_out_channels: "
                "give one value, or one a level"
            )
        return values

    def check_keywords(self) -> None:
        """Refuses by name what is not supported or does not fit.

        Raises:
            UsageError: with the keyword's name and what would work.
        """
        for name, neutral in NEUTRAL.items():
            if getattr(self, name) != neutral:
                raise UsageError(f"{name}={getattr(self, name)!r} is not supported: leave it at {neutral!r}")
        self._check_choices()
        self._check_levels()
        self._check_conditions()

    def _check_choices(self) -> None:
        activation(self.act_fn)
        choices: list[tuple[str, Sequence[str | None], Sequence[str]]] = [
            ("down_block_types", self.down_block_types, DOWN_BLOCKS),
            ("mid_block_type", (self.mid_block_type,), MID_BLOCKS),
            ("up_block_types", self.up_block_types, UP_BLOCKS),
            ("resnet_time_scale_shift", (self.resnet_time_scale_shift,), ("default", "scale_shift")),
            ("class_embed_type", (self.class_embed_type,), CLASS_EMBEDDINGS),
            ("addition_embed_type", (self.addition_embed_type,), ("text_time",)),
        ]
        for name, values, options in choices:
            for value in values:
                if value is not None and value not in options:
                    raise UsageError(f"{name}: '{value}' is not supported: {nearest(value, options)}")
        if self.mid_block_only_cross_attention:
            raise UsageError("mid_block_only_cross_attention=True is not supported: leave it out")

    def _check_levels(self) -> None:
        for name in ("down_block_types", "up_block_types", "layers_per_block", "transformer_layers_per_block"):
            self._each_level(name)
        if self.reverse_transformer_layers_per_block is not None:
            self._each_level("reverse_transformer_layers_per_block")
        if len(set(self._each_level("cross_attention_dim"))) > 1:
            raise UsageError(
                f"cross_attention_dim={tuple(self._each_level('cross_attention_dim'))} differs between levels, but "
                "all of them read the same text states: give one width"
            )
        for config in (*self.down_levels(), self.mid_level(), *self.up_levels()):
            if config.channels % config.num_groups:
                raise UsageError(
                    f"norm_num_groups={config.num_groups} does not divide {config.channels} channels: "
                    "choose a divisor of every entry of block_out_channels"
                )
            if config.num_transformers and config.channels % config.num_heads:
                raise UsageError(
                    f"{config.num_heads} attention heads do not divide {config.channels} channels; note that "
                    "attention_head_dim is the number of heads when num_attention_heads is left out"
                )
        if self.num_attention_heads is not None and self.attention_head_dim != 8:
            widths = self._each_level("attention_head_dim")
            for channels, heads, width in zip(self.block_out_channels, self._heads(), widths, strict=True):
                if heads * width != channels:
                    raise UsageError(
                        f"num_attention_heads={heads} x attention_head_dim={width} is not {channels} channels: "
                        "leave attention_head_dim out"
                    )

    def _check_conditions(self) -> None:
        needs: list[tuple[str, bool, tuple[str, ...]]] = [
            (
                "addition_embed_type='text_time'",
                self.addition_embed_type == "text_time",
                ("addition_time_embed_dim", "projection_class_embeddings_input_dim"),
            ),
            (
                f"class_embed_type='{self.class_embed_type}'",
                self.class_embed_type in ("projection", "simple_projection"),
                ("projection_class_embeddings_input_dim",),
            ),
        ]
        for cause, applies, names in needs:
            for name in names:
                if applies and getattr(self, name) is None:
                    raise UsageError(f"{cause} needs {name}: give its width")


CLASS_EMBEDDINGS = ("timestep", "identity", "projection", "simple_projection")


def keywords_of(config: dict[str, Any], extra: Sequence[str]) -> dict[str, Any]:
    """The constructor keywords in the dict of a `config.json`.

    A key that the file leaves out has diffusers' default, so `cross_attention_dim` is 1280 there. Keys that begin
    with an underscore are the file's own notes.

    Args:
        config: the file's dict.
        extra: further keywords that may stand there.

    Raises:
        UsageError: an unknown key, with the nearest known one.
    """
    known = [field.name for field in fields(UNetKeywords)]
    out: dict[str, Any] = {"cross_attention_dim": 1280, "sample_size": None}
    for name, value in config.items():
        if name.startswith("_"):
            continue
        if name not in known and name not in extra:
            raise UsageError(f"config key '{name}' is unknown: {nearest(name, known)}")
        out[name] = tuple(value) if isinstance(value, list) else value
    return out
