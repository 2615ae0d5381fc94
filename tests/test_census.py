"""Bytes of compiled programs, read from their text."""

import jax
import jax.numpy as jnp
import pytest

from benchmarks.census import take_census

GPU = """HloModule jit_f

%inside (a: f32[8,4]) -> f32[8,4] {
  %a = f32[8,4]{1,0} parameter(0)
  ROOT %negate = f32[8,4]{1,0} negate(%a)
}

%command_buffer (p: f32[8,4], q: bf16[4,4]) -> bf16[8,4] {
  %p = f32[8,4]{1,0} parameter(0)
  %q = bf16[4,4]{1,0} parameter(1)
  %fused = f32[8,4]{1,0} fusion(%p), kind=kLoop, calls=%inside, metadata={op_name="f (32)"}
  %both = (bf16[8,4]{1,0}, s8[4096]{0}) custom-call(%fused, %q), custom_call_target="__cublas$gemm"
  ROOT %get = bf16[8,4]{1,0} get-tuple-element(%both), index=0
}

ENTRY %main (x: f32[8,4], w: bf16[4,4]) -> bf16[8,4] {
  %x = f32[8,4]{1,0} parameter(0)
  %w = bf16[4,4]{1,0} parameter(1)
  %call = bf16[8,4]{1,0} call(%x, %w), to_apply=%command_buffer
  ROOT %k = bf16[8,4]{1,0} custom-call(%call), custom_call_target="__gpu$xla.gpu.triton"
}
"""
TPU = """HloModule jit_f

ENTRY %main.1 (x.1: f32[8,128]) -> f32[8,128] {
  %x.1 = f32[8,128]{1,0:T(8,128)} parameter(0), sharding={replicated}
  %start = (f32[8,128]{1,0:T(8,128)S(1)}, f32[8,128]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%x.1)
  %done = f32[8,128]{1,0:T(8,128)S(1)} copy-done(%start)
  %view = s8[4096]{0:T(1024)} bitcast(%x.1)
  %part = ((s8[4096]{0:T(1024)}), s8[1024]{0:T(1024)S(1)}, s32[]{:S(2)}) slice-start(%view)
  %on = f32[8,128]{1,0:T(8,128)S(1)} fusion(%done), kind=kLoop, calls=%inside
  ROOT %k.1 = f32[8,128]{1,0:T(8,128)} custom-call(%on), custom_call_target="tpu_custom_call"
}
"""


def test_a_gpu_program_moves_the_operands_and_results_of_every_kernel_and_no_work_space():
  census = take_census(GPU)
  fused, product, kernel = 2 * 128, 128 + 32 + 64, 2 * 64
  assert census.bytes == fused + product + kernel
  assert (census.kernels, census.instructions) == (1, 3)


def test_a_tpu_program_moves_what_leaves_or_enters_the_main_memory():
  census = take_census(TPU)
  copied, sliced, written = 4096, 1024, 4096
  assert census.bytes == copied + sliced + written
  assert census.kernels == 1


@pytest.mark.parametrize("rows", [8, 64])
def test_a_product_of_a_compiled_program_moves_its_three_matrices(rows):
  text = jax.jit(jnp.matmul).lower(jnp.ones((rows, 16)), jnp.ones((16, 4))).compile().as_text()
  assert take_census(text or "").bytes == 4 * (rows * 16 + 16 * 4 + rows * 4)
