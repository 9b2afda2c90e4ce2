"""Which kernel is chosen, with which tiles, and what is said of it."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo
from jax.sharding import Mesh

from maxdiffusion.common_types import BlockSizes
from maxdiffusion.errors import UsageError
from maxdiffusion.kernels.attention.choose import KERNELS, choose
from maxdiffusion.kernels.attention.flash_cpu import auto_block_sizes
from maxdiffusion.kernels.attention.flash_gpu import _cudnn_refusal
from maxdiffusion.parallel.layout import Layout
from maxdiffusion.parallel.mesh import abstract_mesh
from maxdiffusion.specs import AttentionSpec, MeshSpec

_FLASH = AttentionSpec(kernel="flash", flash_min_seq_length=0, block_sizes=BlockSizes(block_q=32, block_k=64))


@pytest.fixture
def one(devices: np.ndarray) -> Layout:
    return Layout.of(Mesh(devices[:1], ("data",)))


def _image(length: int) -> tuple[int, int, int, int]:
    return (2, length, 8, 40)


def test_dot_product_is_chosen_as_asked(one: Layout) -> None:
    choice = choose(_image(4096), _image(4096), spec=AttentionSpec(), layout=one)
    assert (choice.kernel, choice.block_sizes, choice.reason) == ("dot_product", None, "attention_kernel='dot_product'")


def test_flash_is_chosen_from_the_threshold_on(one: Layout) -> None:
    spec = AttentionSpec(kernel="flash", flash_min_seq_length=4096)
    choice = choose(_image(4096), _image(4096), spec=spec, layout=one)
    assert choice.kernel == "flash_cpu"
    assert choice.block_sizes == auto_block_sizes(4096, 4096)
    assert "4096 queries x 4096 keys reach flash_min_seq_length=4096" in choice.reason
    assert "blockwise kernel in pure jax (cpu)" in choice.reason and "chosen for these lengths" in choice.reason


@pytest.mark.parametrize(
    ("queries", "keys", "why"), [(4096, 77, "77 keys"), (64, 4096, "64 queries"), (4095, 4095, "4095 keys")]
)
def test_a_short_side_takes_the_dot_product_kernel(one: Layout, queries: int, keys: int, why: str) -> None:
    spec = AttentionSpec(kernel="flash", flash_min_seq_length=4096)
    choice = choose(_image(queries), _image(keys), spec=spec, layout=one)
    assert choice.kernel == "dot_product" and choice.block_sizes is None
    assert choice.reason.startswith(f"{why} are below flash_min_seq_length=4096: scores of {queries} x {keys}")


@pytest.mark.parametrize("length", [16, 8192])
def test_flash_without_a_mesh_says_what_to_do(length: int) -> None:
    with pytest.raises(UsageError, match=r"attention_kernel='flash' needs a mesh.*give mesh=.*'dot_product'"):
        choose(_image(length), _image(length), spec=AttentionSpec(kernel="flash"), layout=Layout.of(None))


def test_the_kernel_follows_the_mesh(one: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Layout, "platform", "tpu")
    spec = AttentionSpec(kernel="flash", flash_min_seq_length=0)
    choice = choose(_image(4608), _image(4608), spec=spec, layout=one)
    assert choice.kernel == "flash_tpu" and choice.block_sizes == KERNELS["flash_tpu"].tiles(4608, 4608, 40)
    assert "splash attention" in choice.reason and "tiles of 512 x 768" in choice.reason
    monkeypatch.setattr(Layout, "platform", "gpu")
    choice = choose(_image(4608), _image(4608), spec=spec, layout=one)
    assert choice.kernel == "flash_gpu" and "Triton" in choice.reason
    choice = choose((1, 4608, 1, 512), (1, 4608, 1, 512), spec=spec, layout=one)
    assert choice.kernel == "flash_cpu" and "heads of 512 are too wide" in choice.reason


@pytest.mark.parametrize(
    ("platform", "sizes", "length", "tiles"),
    [
        ("tpu", (100, 320), 640, "tiles of 128 x 384, which 100 x 320 comes to"),
        ("tpu", (128, 128), 4608, "tiles of 128 x 128"),
        ("gpu", (100, 8), 640, "tiles of 128 x 16, which 100 x 8 comes to"),
        ("gpu", (512, 512), 77, "tiles of 128 x 64, which 512 x 512 comes to"),  # float32: 99 KiB hold no more
        ("cpu", (128, 128), 77, "tiles of 77 x 77, which 128 x 128 comes to"),
    ],
)
def test_the_reason_names_tiles_as_they_run(
    one: Layout, monkeypatch: pytest.MonkeyPatch, platform: str, sizes: tuple[int, int], length: int, tiles: str
) -> None:
    monkeypatch.setattr(Layout, "platform", platform)
    spec = dataclasses.replace(_FLASH, block_sizes=BlockSizes(*sizes))
    choice = choose(_image(length), _image(length), spec=spec, layout=one)
    assert tiles in choice.reason.split("; ") and choice.block_sizes == spec.block_sizes


def test_cudnn_is_chosen_where_it_serves(one: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Layout, "platform", "gpu")
    pick = partial(choose, _image(64), _image(64), spec=_FLASH, layout=one, dtype=jnp.bfloat16)

    def absent() -> int:
        raise RuntimeError("cuDNN is not detected.")

    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", absent)
    _cudnn_refusal.cache_clear()
    choice = pick()
    assert choice.kernel == "flash_gpu" and "for cuDNN refuses: " in choice.reason
    planned = Layout.of(abstract_mesh(MeshSpec(data=1), platform="gpu"))
    choice = pick(layout=planned)
    assert choice.kernel == "flash_gpu" and "cuDNN on a GPU that has it, if it takes heads of" in choice.reason
    assert "; else Triton kernel" in choice.reason
    assert "cuDNN refuses: it takes bfloat16 and float16, not float32" in pick(layout=planned, dtype=jnp.float32).reason
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91_100)
    _cudnn_refusal.cache_clear()
    choice = pick()
    assert choice.kernel == "cudnn" and choice.block_sizes is None
    assert "cuDNN, which ignores flash_block_sizes" in choice.reason
    choice = pick(key_mask=True)
    assert choice.kernel == "flash_gpu" and "takes no mask of keys" in choice.reason
    choice = pick(dtype=jnp.float32)
    assert choice.kernel == "flash_gpu" and "float32" in choice.reason
    _cudnn_refusal.cache_clear()


def test_the_reason_tells_the_share_of_a_device(data_model: Mesh) -> None:
    layout = Layout.of(data_model)
    choice = choose((8, 64, 6, 16), (8, 64, 6, 16), spec=_FLASH, layout=layout)
    assert "each device: batch 2, 3 heads, 64 queries" in choice.reason
    choice = choose((8, 64, 5, 16), (8, 64, 5, 16), spec=_FLASH, layout=layout)
    assert "each device: batch 2, 5 heads" in choice.reason
    assert "activation_heads" in choice.reason and "model" in choice.reason  # why the heads are not shared out
