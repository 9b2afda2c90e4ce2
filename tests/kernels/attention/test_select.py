from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo
from jax.sharding import AxisType, Mesh, NamedSharding

from maxdiffusion.common_types import BlockSizes
from maxdiffusion.errors import IndivisibleError, LayoutWarning, UsageError
from maxdiffusion.kernels.attention.flash_cpu import auto_block_sizes
from maxdiffusion.kernels.attention.flash_gpu import _cudnn_refusal
from maxdiffusion.kernels.attention.reference import dot_product_attention
from maxdiffusion.kernels.attention.select import KERNELS, attention, choose
from maxdiffusion.parallel.layout import Layout
from maxdiffusion.parallel.mesh import abstract_mesh
from maxdiffusion.specs import AttentionSpec, MeshSpec
from tests.kernels.attention.cases import (
    F32_LIMIT,
    arrays,
    collectives,
    errors,
    key_mask,
    on_mesh,
    with_grads,
)

_FLASH = AttentionSpec(kernel="flash", flash_min_seq_length=0, block_sizes=BlockSizes(block_q=32, block_k=64))
_Q = ("activation_batch", "activation_length", "activation_heads", "activation_kv")


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


def test_a_full_mask_takes_the_dot_product_kernel(one: Layout) -> None:
    choice = choose(_image(64), _image(64), spec=_FLASH, layout=one, full_mask=True)
    assert choice.kernel == "dot_product" and "full mask of 64 x 64" in choice.reason
    q, k, v, _ = arrays((2, 9, 1, 8), 9)
    causal = jnp.tril(jnp.ones((9, 9), bool))[None, None]
    found = attention(q, k, v, mask=causal, spec=_FLASH, layout=one)
    assert errors((found,), (dot_product_attention(q, k, v, mask=causal),)) <= [F32_LIMIT]


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


def test_the_same_numbers_on_both_sides_of_the_threshold(one: Layout) -> None:
    args = arrays((2, 64, 2, 40), 64)
    mask = key_mask(2, 64)
    results = []
    for least, kernel in ((64, "flash_cpu"), (65, "dot_product")):
        spec = AttentionSpec(kernel="flash", flash_min_seq_length=least)
        assert choose(args[0].shape, args[1].shape, spec=spec, layout=one).kernel == kernel
        results.append(jax.jit(with_grads(partial(attention, spec=spec, layout=one), mask))(*args))
    assert max(errors(*results)) <= F32_LIMIT


@pytest.mark.parametrize("axes", [("data", "tensor"), ("data", "model")])
@pytest.mark.parametrize("kernel", ["flash", "dot_product"])
def test_each_device_computes_its_own_rows_and_heads(devices: np.ndarray, axes: tuple[str, str], kernel: str) -> None:
    """Equal to one device, forward and backward, and nothing at all is exchanged."""
    args, mask = arrays((4, 70, 2, 8), 90), key_mask(4, 90)
    layout = Layout.of(Mesh(devices.reshape(4, 2), axes))
    spec = AttentionSpec(kernel=kernel, flash_min_seq_length=0, block_sizes=_FLASH.block_sizes)
    found, text = on_mesh(layout, args, mask, spec)
    assert found[0].sharding.shard_shape(found[0].shape) == (1, 70, 1, 8)
    assert not collectives(text)
    wanted = jax.jit(with_grads(dot_product_attention, mask))(*args)
    assert max(errors(found, wanted)) <= F32_LIMIT


def test_batch_and_heads_that_do_not_divide(data_model: Mesh) -> None:
    args, mask = arrays((3, 40, 3, 8), 40), key_mask(3, 40)
    with pytest.warns(LayoutWarning, match="activation_(batch|heads) of 3 does not divide") as said:
        found, _ = on_mesh(Layout.of(data_model), args, mask, _FLASH)
    assert {str(one.message).split()[0] for one in said} == {"activation_batch", "activation_heads"}
    assert max(errors(found, jax.jit(with_grads(dot_product_attention, mask))(*args))) <= F32_LIMIT
    strict = Layout.of(data_model, strict=True)
    with pytest.raises(IndivisibleError):
        attention(*args[:3], spec=_FLASH, layout=strict)


def test_queries_over_the_sequence_axis_see_all_keys(devices: np.ndarray) -> None:
    args, mask = arrays((2, 64, 1, 8), 90), key_mask(2, 90)
    layout = Layout.of(Mesh(devices.reshape(2, 4), ("data", "context")))
    found, text = on_mesh(layout, args, mask, _FLASH)
    assert found[0].sharding.shard_shape(found[0].shape) == (1, 16, 1, 8)
    assert set(collectives(text)) == {"all-reduce"}  # the gradients of keys and values, from all queries
    assert max(errors(found, jax.jit(with_grads(dot_product_attention, mask))(*args))) <= F32_LIMIT


def test_rules_that_shard_keys_or_head_size_still_give_whole_keys_and_heads(devices: np.ndarray) -> None:
    args, mask = arrays((2, 40, 1, 8), 80), key_mask(2, 80)
    rules = [("activation_kv_length", "context"), ("activation_kv", "tensor"), ("activation_heads", None)]
    layout = Layout.of(Mesh(devices.reshape(2, 2, 2), ("data", "context", "tensor")), rules)
    spec = dataclasses.replace(_FLASH, context="gather")
    choice = choose(args[0].shape, args[1].shape, spec=spec, layout=layout)
    assert "activation_kv is gathered along tensor" in choice.reason
    assert "activation_kv_length is gathered along context" in choice.reason
    found, text = on_mesh(layout, args, mask, spec)
    assert "all-gather" in text
    assert max(errors(found, jax.jit(with_grads(dot_product_attention, mask))(*args))) <= F32_LIMIT


def test_an_explicit_mesh(devices: np.ndarray) -> None:
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    args = arrays((4, 40, 2, 8), 40)
    layout = Layout.of(mesh)
    spec = layout.spec(*_Q)
    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x in args[:3]]
    found = jax.jit(partial(attention, spec=_FLASH, layout=layout))(*placed)
    assert errors((found,), (dot_product_attention(*args[:3]),)) <= [F32_LIMIT]


def test_misfits_are_named_before_anything_runs(one: Layout) -> None:
    q, k, v, _ = arrays((2, 64, 4, 8), 32)
    with pytest.raises(UsageError, match="look swapped"):
        attention(*(jnp.swapaxes(x, 1, 2) for x in (q, k, v)), spec=_FLASH, layout=one)
