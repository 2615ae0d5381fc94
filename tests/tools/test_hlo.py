"""What programs move, as counted in the text of real ones and of pieces written for TPUs."""

import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from compmod_jax.core import scopes
from compmod_jax.core.sharding import MeshConfig, make_mesh
from compmod_jax.tools import hlo
from compmod_jax.training.distributed.collectives import Collective, census

ROWS, WIDTH = 256, 64


def compiled(function, *given, **options):
  return hlo.Module.parse(jax.jit(function, **options).lower(*given).compile().as_text())


def split(mesh, *axes, shape=(ROWS, WIDTH)):
  sharding = NamedSharding(mesh, PartitionSpec(*axes))
  return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)


def large(found):
  """Collectives that move more than a few numbers."""
  return Counter({one: times for one, times in found.items() if one.bytes > 64})


# Programs for the devices that are here.


@pytest.fixture(scope="module")
def mesh():
  return make_mesh(MeshConfig(data=4, fsdp=2, tensor=1))


def test_a_sum_over_rows_on_several_devices_is_an_all_reduce(mesh):
  found = large(census(compiled(lambda x: jnp.sum(x, axis=0), split(mesh, "data"))))
  assert found == {Collective("all-reduce", 4 * WIDTH, 4): 1}
  (one,) = found
  assert one.sent == 2 * 3 / 4 * 4 * WIDTH


def test_putting_parts_together_is_an_all_gather_of_the_whole(mesh):
  whole = NamedSharding(mesh, PartitionSpec())
  found = census(compiled(lambda x: x + 1, split(mesh, "fsdp"), out_shardings=whole))
  assert found == {Collective("all-gather", 4 * ROWS * WIDTH, 2): 1}
  (one,) = found
  assert one.sent == 1 / 2 * 4 * ROWS * WIDTH


def test_a_collective_in_a_loop_counts_as_often_as_the_loop_runs(mesh):
  def many(x):
    def turn(carry, _):
      return jnp.tanh(carry + jnp.sum(carry * x, axis=0, keepdims=True)), None

    return jax.lax.scan(turn, x, None, length=7)[0]

  module = compiled(many, split(mesh, ("data", "fsdp")))
  assert large(census(module)) == {Collective("all-reduce", 4 * WIDTH, 8): 7}
  assert module.endless() == 0


def test_a_loop_that_does_not_tell_how_often_it_runs_is_reported():
  module = compiled(
    lambda x: jax.lax.while_loop(lambda y: jnp.sum(y) < 9, lambda y: y * 2, x), jnp.ones(8)
  )
  assert module.endless() == 1


def test_a_loop_that_runs_only_if_needed_counts_nothing_and_is_reported():
  # Names alone make no other program: a compile cache would give the first one again.
  def repeat(x, scope, factor):
    with jax.named_scope(scope):
      return jax.lax.while_loop(lambda y: jnp.sum(y) < 9, lambda y: y * factor, x)

  module, other = (
    compiled(functools.partial(repeat, scope=scope, factor=factor), jnp.ones(100_000))
    for scope, factor in ((scopes.IF_NEEDED, 2), ("other", 3))
  )
  assert (module.spare(), module.endless()) == (1, 0)
  assert other.spare() == 0
  assert hlo.traffic(module) < hlo.traffic(other)


def test_a_program_reads_what_it_is_given_and_writes_what_it_makes():
  x = jnp.ones((ROWS, WIDTH))
  size = x.size * 4
  assert hlo.traffic(compiled(lambda x: x * 2 + 1, x)) == 2 * size
  assert hlo.traffic(compiled(lambda x, y: x * y, x, x)) == 3 * size


def test_a_loop_that_reads_slices_reads_the_whole_once():
  x = jnp.ones((32, 100_000))
  module = compiled(lambda x: jax.lax.map(jnp.tanh, x), x)
  assert hlo.traffic(module) == pytest.approx(2 * x.size * 4, rel=0.6)


# Pieces of programs as XLA writes them for TPUs.

TPU = """\
HloModule jit_step, is_scheduled=true, num_partitions=16

%add.clone (x.3: bf16[], y.1: bf16[]) -> bf16[] {
  %x.3 = bf16[]{:T(256)} parameter(0)
  %y.1 = bf16[]{:T(256)} parameter(1)
  ROOT %add.9 = bf16[]{:T(256)} add(%x.3, %y.1)
}

%all-reduce-scatter.1 (input.2: bf16[1024,1024]) -> bf16[256,1024] {
  %input.2 = bf16[1024,1024]{1,0:T(8,128)(2,1)} parameter(0)
  %all-reduce.8 = bf16[1024,1024]{1,0:T(8,128)(2,1)} all-reduce(%input.2), channel_id=4, \
replica_groups={{0,1,2,3},{4,5,6,7},{8,9,10,11},{12,13,14,15}}, to_apply=%add.clone
  %constant.1 = s32[]{:T(128)} constant(0)
  ROOT %dynamic-slice.3 = bf16[256,1024]{1,0:T(8,128)(2,1)S(1)} \
dynamic-slice(%all-reduce.8, %constant.1, %constant.1), dynamic_slice_sizes={256,1024}
}

%fused_computation.14 (param_0.48: bf16[256,1024]) -> (bf16[256,1024], bf16[1024,1024], u32[]) {
  %param_0.48 = bf16[256,1024]{1,0:T(8,128)(2,1)} parameter(0)
  %all-gather.18 = bf16[1024,1024]{1,0:T(8,128)(2,1)} all-gather(%param_0.48), channel_id=7, \
replica_groups=mesh['axis_0'=4,'axis_1'=1,'axis_2'=4], device_ids=([4,4]T(1,0)) {'axis_0'}
  ROOT %custom-call.6 = (bf16[256,1024]{1,0}, bf16[1024,1024]{1,0}, u32[]{:S(2)}) \
custom-call(%all-gather.18), custom_call_target="AsyncCollectiveStart"
}

%fused_computation.16 (param_0.56: bf16[256,1024], param_1.64: bf16[1024,1024]) -> bf16[1024,1024] {
  %param_0.56 = bf16[256,1024]{1,0:T(8,128)(2,1)} parameter(0)
  %param_1.64 = bf16[1024,1024]{1,0:T(8,128)(2,1)} parameter(1)
  %all-gather.22 = bf16[1024,1024]{1,0:T(8,128)(2,1)} all-gather(%param_0.56), channel_id=7, \
replica_groups=mesh['axis_0'=4,'axis_1'=1,'axis_2'=4], device_ids=([4,4]T(1,0)) {'axis_0'}
  ROOT %custom-call.8 = bf16[1024,1024]{1,0:T(8,128)(2,1)} \
custom-call(%param_0.56, %param_1.64, %all-gather.22), custom_call_target="AsyncCollectiveDone"
}

%body (arg.1: (s32[], bf16[1024,1024])) -> (s32[], bf16[1024,1024]) {
  %arg.1 = (s32[]{:T(128)}, bf16[1024,1024]{1,0:T(8,128)(2,1)}) parameter(0)
  %gte.1 = s32[]{:T(128)} get-tuple-element(%arg.1), index=0
  %gte.2 = bf16[1024,1024]{1,0:T(8,128)(2,1)} get-tuple-element(%arg.1), index=1
  %fusion.24 = bf16[256,1024]{1,0:T(8,128)(2,1)S(1)} fusion(%gte.2), kind=kCustom, \
calls=%all-reduce-scatter.1, metadata={op_name="jit(step)/while/body (inner)"}
  ROOT %tuple.1 = (s32[]{:T(128)}, bf16[1024,1024]{1,0:T(8,128)(2,1)}) tuple(%gte.1, %gte.2)
}

%condition (arg.2: (s32[], bf16[1024,1024])) -> pred[] {
  %constant.76 = s32[]{:T(128)} constant(10)
  %arg.2 = (s32[]{:T(128)}, bf16[1024,1024]{1,0:T(8,128)(2,1)}) parameter(0)
  %gte.3 = s32[]{:T(128)} get-tuple-element(%arg.2), index=0
  ROOT %lt.13 = pred[]{:T(512)} compare(%gte.3, %constant.76), direction=LT
}

ENTRY %main.7_spmd (param.5: bf16[256,1024], param.4: f32[512,128]) -> bf16[1024,1024] {
  %param.5 = bf16[256,1024]{1,0:T(8,128)(2,1)} parameter(0)
  %param.4 = f32[512,128]{1,0:T(8,128)} parameter(1)
  %copy-start.1 = (f32[512,128]{1,0:T(8,128)S(1)}, f32[512,128]{1,0:T(8,128)}, u32[]{:S(2)}) \
copy-start(%param.4)
  %copy-done.1 = f32[512,128]{1,0:T(8,128)S(1)} copy-done(%copy-start.1)
  %slice-start.1 = ((f32[512,128]{1,0:T(8,128)}), f32[64,128]{1,0:T(8,128)S(1)}, s32[]{:S(2)}) \
slice-start(%param.4), slice={[0:64], [0:128]}
  %slice-done.1 = f32[64,128]{1,0:T(8,128)S(1)} slice-done(%slice-start.1)
  %negate.1 = f32[512,128]{1,0:T(8,128)S(1)} negate(%copy-done.1)
  %start = (bf16[256,1024]{1,0}, bf16[1024,1024]{1,0}, u32[]{:S(2)}) fusion(%param.5), \
kind=kCustom, calls=%fused_computation.14
  %gte.4 = bf16[256,1024]{1,0} get-tuple-element(%start), index=0
  %gte.5 = bf16[1024,1024]{1,0} get-tuple-element(%start), index=1
  %done = bf16[1024,1024]{1,0} fusion(%gte.4, %gte.5), kind=kCustom, calls=%fused_computation.16
  %constant.2 = s32[]{:T(128)} constant(0)
  %tuple.2 = (s32[]{:T(128)}, bf16[1024,1024]{1,0:T(8,128)(2,1)}) tuple(%constant.2, %done)
  %while.1 = (s32[]{:T(128)}, bf16[1024,1024]{1,0:T(8,128)(2,1)}) while(%tuple.2), \
condition=%condition, body=%body
  ROOT %gte.6 = bf16[1024,1024]{1,0:T(8,128)(2,1)} get-tuple-element(%while.1), index=1
}
"""
SHARD, WHOLE = 256 * 1024 * 2, 1024 * 1024 * 2


def test_collectives_of_a_tpu_are_known_whatever_they_are_fused_with():
  found = census(hlo.Module.parse(TPU))
  gathered, scattered = Collective("all-gather", WHOLE, 4), Collective("reduce-scatter", WHOLE, 4)
  assert found == {gathered: 1, scattered: 10}
  assert gathered.sent == scattered.sent == 3 / 4 * WHOLE


def test_what_stays_on_the_chip_is_no_traffic_with_main_memory():
  prefetched = 512 * 128 * 4 + 64 * 128 * 4
  # Gathered: the shard is read and the whole is written; in the loop the whole is read each time.
  assert hlo.traffic(hlo.Module.parse(TPU)) == prefetched + SHARD + WHOLE + 10 * WHOLE


@pytest.mark.parametrize(
  ("groups", "size"),
  [
    ("replica_groups={{0,4},{1,5}}", 2),
    ("replica_groups=[2,8]<=[16]", 8),
    ("replica_groups=[4,4]<=[4,4]T(1,0)", 4),
    ("replica_groups=mesh['axis_0'=16,'axis_1'=2] {'axis_0','axis_1'}", 32),
    ("replica_groups=mesh['axis_0'=16] {'axis_0':(4)2}", 2),
  ],
)
def test_every_way_to_name_groups_is_read(groups, size):
  line = f"ROOT %r = f32[8]{{0}} all-reduce(%p), channel_id=1, {groups}, to_apply=%add"
  text = f"ENTRY %main (p: f32[8]) -> f32[8] {{\n  %p = f32[8]{{0}} parameter(0)\n  {line}\n}}\n"
  assert census(hlo.Module.parse(text)) == {Collective("all-reduce", 32, size): 1}


def test_collectives_that_share_a_channel_count_each():
  kind = "ragged-all-to-all(%p, %p), channel_id=1, replica_groups={{0,1},{2,3}}"
  lines = [f"%a = f32[8]{{0}} {kind}", f"ROOT %b = f32[8]{{0}} {kind}"]
  head = "ENTRY %main (p: f32[8]) -> f32[8] {\n  %p = f32[8]{0} parameter(0)\n  "
  module = hlo.Module.parse(head + "\n  ".join(lines) + "\n}\n")
  assert census(module) == {Collective("ragged-all-to-all", 32, 2): 2}


def test_a_ring_sends_each_byte_on_from_chip_to_chip():
  sent = {kind: Collective(kind, 1600, 16).sent for kind in ("all-reduce", "all-gather")}
  assert sent == {"all-reduce": 3000, "all-gather": 1500}
  assert Collective("collective-permute", 1600, 2).sent == 1600
  np.testing.assert_allclose(Collective("all-to-all", 1600, 4).sent, 1200)


def test_reduce_scatters_that_share_a_channel_count_each():
  """As XLA writes them for the gradients of a slice of four chips."""
  kind = "all-reduce(%i), channel_id=1, replica_groups={{0,1,2,3}}, to_apply=%add"
  fused = "\n".join(
    f"%all-reduce-scatter.{n} (i: f32[8]) -> f32[2] {{\n  %i = f32[8]{{0}} parameter(0)\n"
    f"  %r.{n} = f32[8]{{0}} {kind}\n"
    f"  ROOT %s.{n} = f32[2]{{0}} dynamic-slice(%r.{n}), dynamic_slice_sizes={{2}}\n}}\n"
    for n in (13, 14)
  )
  calls = [
    f"%f.{n} = f32[2]{{0}} fusion(%p), kind=kCustom, calls=%all-reduce-scatter.{n}"
    for n in (13, 14)
  ]
  head = "ENTRY %main (p: f32[8]) -> f32[2] {\n  %p = f32[8]{0} parameter(0)\n  "
  module = hlo.Module.parse(fused + head + "\n  ".join(calls) + "\n}\n")
  assert census(module) == {Collective("reduce-scatter", 32, 4): 2}
