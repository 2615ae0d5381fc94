"""Attention and its competition on the NVIDIA GPU that is here: right first, then how fast.

    python -m benchmarks.gpu [--only PART ...] [--share I/N] [--quick] [--json FILE] [--check]

Parts; on an H100 `attention` took a minute and a half, and `tiles` 20 seconds:

- `checks`: values and gradients of the kernels, as they are cut for this GPU, against their
  definition on the same numbers in float32. Errors are norms of differences over norms, the worst
  of all results; with dropout they are small only if both drop the same probabilities.
- `attention`: 16,384 tokens, 8 heads of 64, bfloat16, in rows of 128, 1,024 and 4,096: flash
  attention without weights, with weights, and with the competition inside, beside cuDNN's and
  XLA's.
- `tiles`: other cuts of the kernels, rows of 1,024 tokens.
- `layers`: whole attention layers of `benchmarks/attention.py`.
- `experts`: weight gradients of experts in one kernel, beside one product of as many rows.
- `cache`: a step of decoding, attention to a cache of 2,048 keys of which some are written.
- `text`: a training step of GPT-2 Small on one text of 8,192 tokens, with the memory that it took.

What takes microseconds runs many times in one program (`common.repeat`), which wants its arguments
back unchanged: with the competition inside, a copy of the packed matrix counts in `training`, as
the forward pass writes into it.

XLA tries many kernels for products in full float32, for minutes. `checks`, whose definitions have
them, take one with `XLA_FLAGS=--xla_gpu_autotune_level=0`, which makes other products slow, and
less if `--share` spreads them over processes. `layers` take less than one with
`XLA_FLAGS=--xla_gpu_enable_triton_gemm=false`, which leaves products to cuBLAS.
"""

import argparse
import dataclasses
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import cached_attention, common, devices, long_text
from benchmarks.attention import HEADS, LAYERS, TIMES, WIDTH
from benchmarks.routing import PASSES, Case
from compmod_jax.kernels import grouped
from compmod_jax.kernels.attention import (
  ProbabilityDropout,
  Tiles,
  Visibility,
  flash_attention,
  packed_attention,
  paired_attention,
  routed_attention,
)
from compmod_jax.kernels.attention.cached import attend_to_cache, attend_to_cache_on_gpu
from compmod_jax.kernels.attention.distances import DistanceBias, of_pairs
from compmod_jax.kernels.routing import Choice, Readout, Rule
from compmod_jax.layers.attention import Attention
from compmod_jax.layers.positions import distance_penalties

PARTS = ("checks", "attention", "tiles", "layers", "experts", "cache", "text")
TOKENS, HEAD_DIM, HIDDEN = 16_384, 64, 128
REPEATS = 20
# Norm of the error over the norm: float32 products run in TF32 (10 bits), bfloat16 has 7.
MOST_ERROR = {"float32": 3e-3, "bfloat16": 2e-2}
LEAST_SPEED, MOST_OVERHEAD = 0.6, 1.03
FORWARD_TILES = (
  (128, 64, 4, 3),
  (128, 64, 8, 3),
  (128, 128, 8, 2),
  (64, 64, 4, 3),
  (128, 32, 4, 4),
  (64, 128, 4, 2),
)
BACKWARD_TILES = (
  (64, 64, 4, 3),
  (64, 64, 4, 2),
  (64, 64, 4, 4),
  (64, 64, 8, 2),
  (32, 64, 4, 3),
  (64, 32, 4, 3),
  (64, 128, 8, 2),
  (128, 64, 8, 2),
)

Function = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Check:
  """A call whose kernel and definition must agree.

  Attributes:
    head_dim: columns of a head.
    dtype: of its operands.
    visibility: which keys a query reads; `biases` are added by distance, in causal order.
    queries: of an example.
    keys: likewise.
    key_heads: of 4 heads.
    rate: of dropout.
    kind: `apart`, `pairs`, `packed` or `routed`.
    rule: how the competition selects.
  """

  head_dim: int
  dtype: str
  visibility: str = "all"
  queries: int = 200
  keys: int = 200
  key_heads: int = 4
  rate: float = 0.0
  kind: str = "routed"
  rule: Rule = "soft"

  @property
  def name(self) -> str:
    """In a few words."""
    facts = [f"{self.kind}, heads of {self.head_dim}, {self.dtype}, {self.visibility}"]
    facts += [f"{self.key_heads} heads of keys"] * (self.key_heads != 4)
    facts += [f"dropout {self.rate}"] * (self.rate > 0) + [self.rule] * (self.rule != "soft")
    return ", ".join(facts)

  def seen(self) -> Visibility:
    """The rule of `visibility`."""
    if self.visibility == "padding":
      ids = np.where(np.arange(self.keys)[None] < np.array([[self.keys - 70], [3]]), 0, -1)
      return Visibility(key_ids=jnp.asarray(ids, jnp.int32))
    if self.visibility == "segments":
      ids = jnp.asarray(np.arange(self.queries)[None] // 67 + 1, jnp.int32)
      return Visibility(causal=True, query_ids=ids, key_ids=ids)
    if self.visibility == "window":
      return Visibility(causal=True, window=50, prefix=5)
    if self.visibility == "penalties":
      return Visibility(causal=True, penalties=distance_penalties(4))
    return Visibility(causal=self.visibility in ("causal", "biases"))

  def functions(self) -> tuple[Function, Function, tuple[Any, jax.Array]]:
    """The kernel and the definition, each with its gradients, and their arguments."""
    batch, heads, width = 2, 4, self.head_dim
    keys = iter(jax.random.split(jax.random.key(0), 8))

    def draw(*shape: int, scale: float = 1.0) -> jax.Array:
      return scale * jax.random.normal(next(keys), shape)

    made = (batch, self.queries, heads, width)
    dropout = ProbabilityDropout.of(jax.random.key(7), self.rate, batch, heads)
    options: dict[str, Any] = {"visibility": self.seen()}
    if self.rate:
      options["dropout"] = dropout
    if self.kind == "apart":
      others = (batch, self.keys, self.key_heads, width)
      wide = (draw(*made), draw(*others), draw(*others))
      weights = jnp.abs(draw(*made[:3]))

      def run(args: Any, **how: Any) -> Any:
        return flash_attention(*args, weights=weights, **options, **how)

    elif self.kind == "pairs":
      wide = (draw(*made), draw(batch, self.keys, self.key_heads, 2, width))

      def run(args: Any, **how: Any) -> Any:
        return paired_attention(*args, **options, **how)

    elif self.kind == "packed":
      wide = (draw(batch, self.queries, heads, 3 * width), draw(heads, 3 * width, scale=0.3))

      def run(args: Any, **how: Any) -> Any:
        return packed_attention(*args, **options, **how)

    else:
      columns = 3 * heads * width + HIDDEN
      wide = (
        draw(batch, self.queries, columns),
        draw(columns, scale=0.3),
        draw(HIDDEN, heads, scale=0.2),
      )
      choice = Choice(self.rule, 2 if self.rule == "top_k" else None)

      def run(args: Any, **how: Any) -> Any:
        packed, bias, kernel = args
        readout = Readout(kernel, jnp.zeros((heads,)))
        sizes = {"heads": heads, "head_dim": width, "choice": choice}
        return routed_attention(packed, bias, readout, **sizes, **options, **how)

    biased = self.visibility == "biases"
    if biased:
      wide = (*wide, draw(heads, 2 * self.queries - 1))

    def run_with_bias(args: Any, **how: Any) -> Any:
      if biased:
        *args, numbers = args
        how["distance_bias"] = DistanceBias(numbers)
      return run(tuple(args), **how)

    slope = draw(*(made if self.kind != "routed" else (batch, self.queries, heads * width)))

    def both(args: Any, slope: jax.Array, **how: Any) -> Any:
      def main(args: Any) -> Any:
        found = run_with_bias(args, **how)
        return found[0] if self.kind == "routed" else found

      found, pull = jax.vjp(main, args)
      return found, pull(slope.astype(found.dtype))

    count = {"apart": 3, "pairs": 2}.get(self.kind, 1)
    narrow = jax.tree.map(lambda x: x.astype(self.dtype), wide[:count])
    args = ((*narrow, *wide[len(narrow) :]), slope.astype(self.dtype))

    def exact(args: Any, slope: jax.Array) -> Any:
      with jax.default_matmul_precision("highest"):
        args, slope = jax.tree.map(lambda x: x.astype(jnp.float32), (args, slope))
        return both(args, slope, implementation="reference")

    return functools.partial(both, implementation="gpu"), exact, args


CHECKS = (
  *(Check(width, dtype) for width in (32, 64, 96, 128) for dtype in MOST_ERROR),
  *(Check(width, dtype, rate=0.2) for width in (64, 128) for dtype in MOST_ERROR),
  # Rounded scores may choose other heads.
  Check(64, "float32", rule="top_k"),
  Check(64, "float32", "causal", kind="packed"),
  Check(64, "bfloat16", "all", 256, 384, kind="apart"),
  Check(64, "bfloat16", "segments", kind="packed"),
  Check(64, "bfloat16", "window"),
  Check(40, "bfloat16", "padding"),
  Check(64, "bfloat16", "padding", queries=130, keys=333, kind="apart"),
  Check(64, "float32", "causal", key_heads=2, kind="apart"),
  Check(32, "float32", "padding", rate=0.1, kind="packed"),
  Check(64, "bfloat16", "penalties", kind="packed"),
  Check(64, "bfloat16", "padding", queries=130, keys=333, key_heads=2, kind="pairs"),
  Check(64, "float32", "biases"),
  Check(64, "bfloat16", "biases", kind="packed"),
  Check(128, "bfloat16", "biases", key_heads=2, rate=0.1, kind="apart"),
)


def check(report: common.Report, options: argparse.Namespace) -> None:
  """Compares kernels with definitions."""
  first, step = map(int, options.share.split("/"))
  for case in CHECKS[:: 4 if options.quick else 1][first::step]:
    *functions, args = case.functions()
    found, truth = (jax.tree.leaves(jax.jit(function)(*args)) for function in functions)
    error = max(map(relative_error, found, truth))
    report.claim(f"error, {case.name}", error, 1.0, at_most=MOST_ERROR[case.dtype])


def relative_error(found: jax.Array, truth: jax.Array | np.ndarray) -> float:
  """Norm of the difference over the norm."""
  mine, exact = (np.asarray(x, np.float64) for x in (found, truth))
  return float(np.linalg.norm(mine - exact) / np.linalg.norm(exact))


class Timed:
  """Programs that are compiled side by side, and then timed in turn."""

  def __init__(self, report: common.Report, group: str, rounds: int):
    self.report, self.group, self.rounds = report, group, rounds
    self.made: dict[str, tuple[Function, tuple[Any, ...]]] = {}

  def add(self, name: str, function: Function, *args: Any) -> None:
    """Another program."""
    self.made[name] = jax.jit(common.repeat(function, REPEATS)), args

  def seconds(self, tokens: int) -> dict[str, np.ndarray]:
    """Of every program that this GPU takes; the others are named in a note."""
    runs = {}
    with ThreadPoolExecutor() as pool:
      waiting = {
        name: pool.submit(lambda f, a: f.lower(*a).compile(), function, args)
        for name, (function, args) in self.made.items()
      }
      for name, one in waiting.items():
        try:
          program, args = one.result(), self.made[name][1]
        except Exception as error:  # which programs a GPU refuses is part of the result
          self.report.note(f"{self.group}: {name} was refused: {str(error)[:200]}")
        else:
          runs[name] = lambda p=program, a=args: jax.block_until_ready(p(*a))
    amount = REPEATS * tokens
    return self.report.measure(self.group, runs, self.rounds, amount=amount, unit="tokens")


def training(function: Function) -> Function:
  """A function of arrays with its gradients; the last argument is the slope."""

  def both(*args: Any) -> Any:
    made, pull = jax.vjp(function, *args[:-1])
    return made, pull(args[-1])

  return both


def drawn(seed: int, *shape: int, dtype: Any = jnp.bfloat16, scale: float = 1.0) -> jax.Array:
  """Normal numbers."""
  return (scale * jax.random.normal(jax.random.key(seed), shape)).astype(dtype)


def attention(report: common.Report, options: argparse.Namespace) -> None:
  """Attention by itself: ours, with weights, with competition, cuDNN's and XLA's."""
  for time, causal in [(t, False) for t in TIMES] + [(1024, True)]:
    shape = (TOKENS // time, time, HEADS, HEAD_DIM)
    query, key, value, slope = (drawn(seed, *shape) for seed in range(4))
    weights = jax.nn.softmax(drawn(4, *shape[:3], dtype=jnp.float32))
    columns = 3 * HEADS * HEAD_DIM + HIDDEN
    packed, kernel = drawn(5, *shape[:2], columns), drawn(6, HIDDEN, HEADS, scale=0.1)
    shift, seen = jnp.zeros((columns,)), Visibility(causal=causal)

    def ours(
      query: Any, key: Any, value: Any, weights: Any = None, seen: Visibility = seen
    ) -> jax.Array:
      how: dict[str, Any] = {"visibility": seen, "implementation": "gpu"}
      return flash_attention(query, key, value, weights=weights, **how)

    def inside(packed: jax.Array, kernel: jax.Array, seen: Visibility = seen) -> jax.Array:
      readout = Readout(kernel, jnp.zeros((HEADS,)))
      sizes: dict[str, Any] = {"heads": HEADS, "head_dim": HEAD_DIM, "visibility": seen}
      made, _ = routed_attention(packed, shift, readout, **sizes, implementation="gpu")
      return made

    def biased(query: Any, key: Any, value: Any, numbers: Any, seen: Visibility = seen) -> Any:
      how: dict[str, Any] = {"distance_bias": DistanceBias(numbers), "implementation": "gpu"}
      return flash_attention(query, key, value, visibility=seen, **how)

    def theirs(
      query: Any, key: Any, value: Any, numbers: Any = None, how: Any = None, causal: bool = causal
    ) -> Any:
      bias = None if numbers is None else of_pairs(numbers)[None].astype(query.dtype)
      return jax.nn.dot_product_attention(
        query, key, value, bias, is_causal=causal, implementation=how
      )

    programs: dict[str, tuple[Function, tuple[jax.Array, ...]]] = {
      "ours": (ours, (query, key, value)),
      "ours, weights": (ours, (query, key, value, weights)),
      "ours, competition inside": (inside, (packed, kernel)),
      "cuDNN": (functools.partial(theirs, how="cudnn"), (query, key, value)),
      "XLA": (functools.partial(theirs, how="xla"), (query, key, value)),
    }
    if time == 1024:
      numbers = drawn(7, HEADS, 2 * time - 1, dtype=jnp.float32)
      one = (query, key, value, numbers)
      programs["ours, biases by distance"] = biased, one
      programs["cuDNN, biases by distance"] = functools.partial(theirs, how="cudnn"), one
    for which in PASSES:
      group = f"rows of {time}{', causal' if causal else ''}, {which}"
      timed = Timed(report, group, 5 if options.quick else 20)
      for name, (function, args) in programs.items():
        if name == "XLA" and time != 1024:  # it forms all pairs, and takes long
          continue
        if which == "forward":
          timed.add(name, function, *args)
        else:
          flat = slope.reshape(*slope.shape[:2], -1) if "inside" in name else slope
          timed.add(name, training(function), *args, flat)
      found = timed.seconds(TOKENS)
      compare(report, group, found)


def compare(report: common.Report, group: str, found: dict[str, np.ndarray]) -> None:
  """Claims about the programs that ran."""
  ratios: dict[str, tuple[str, str, dict[str, float]]] = {
    "our speed with the competition inside / cuDNN's without": (
      "cuDNN",
      "ours, competition inside",
      {"at_least": LEAST_SPEED},
    ),
    "our speed / cuDNN's": ("cuDNN", "ours", {}),
    "weights / without": ("ours, weights", "ours", {}),
    "biases by distance / without": ("ours, biases by distance", "ours", {}),
    "our speed / cuDNN's, biases by distance": (
      "cuDNN, biases by distance",
      "ours, biases by distance",
      {},
    ),
    "our time / XLA's": ("ours", "XLA", {}),
  }
  for name, (one, other, target) in ratios.items():
    if one in found and other in found:
      report.claim(f"{group}: {name}", found[one], found[other], **target)


def tiles(report: common.Report, options: argparse.Namespace) -> None:
  """Other cuts of the kernels."""
  shape = (TOKENS // 1024, 1024, HEADS, HEAD_DIM)
  args = tuple(drawn(seed, *shape) for seed in range(4))
  groups = {"forward": FORWARD_TILES, "training": BACKWARD_TILES}
  for which, cuts in groups.items():
    timed = Timed(report, f"cut, {which}", 5 if options.quick else 10)
    for cut in cuts:
      sizes = Tiles(forward=cut) if which == "forward" else Tiles(backward=cut)
      function = functools.partial(flash_attention, tiles=sizes, implementation="gpu")
      function = function if which == "forward" else training(function)
      timed.add(str(cut), function, *args[: 3 if which == "forward" else 4])
    timed.seconds(TOKENS)


def layers(report: common.Report, options: argparse.Namespace) -> None:
  """Whole attention layers, without competition and with it."""
  for time in TIMES[1:2] if options.quick else TIMES:
    case = Case(batch=TOKENS // time, time=time, dim=WIDTH, heads=HEADS, dtype="bfloat16")
    inputs = [drawn(seed, *case.shape) for seed in range(2)]
    made = {
      name: case.passes(Attention(WIDTH, HEADS, competition, dtype=case.dtype))
      for name, competition in LAYERS.items()
    }
    for number, which in enumerate(PASSES):
      group = f"layer, rows of {time}, {which}"
      timed = Timed(report, group, 5 if options.quick else 20)
      for name, (params, passes) in made.items():
        timed.add(name, passes[which], params, *inputs[: number + 1])
      found = timed.seconds(TOKENS)
      for name in list(made)[1:]:
        target = {"at_most": MOST_OVERHEAD} if name == "inside" else {}
        report.claim(f"{group}: {name} / plain", found[name], found["plain"], **target)


def experts(report: common.Report, options: argparse.Namespace) -> None:
  """Weight gradients of eight experts."""
  rows = 8192
  left, right = drawn(0, rows, WIDTH), drawn(1, rows, 4 * WIDTH)
  sizes = jnp.asarray([2048, 1024, 1024, 3000, 72, 0, 500, 524], jnp.int32)
  ends = np.cumsum(np.asarray(sizes))
  timed = Timed(report, "weight gradients of experts", 5 if options.quick else 20)
  function = functools.partial(grouped.outer, implementation="triton")
  one, two = (np.asarray(x, np.float64) for x in (left, right))
  spans = zip(ends - np.asarray(sizes), ends, strict=True)
  truth = np.stack([one[begin:end].T @ two[begin:end] for begin, end in spans])
  error = relative_error(jax.jit(function)(left, right, sizes), truth)
  report.claim("experts: error", error, 1.0, at_most=MOST_ERROR["bfloat16"])
  timed.add("groups", function, left, right, sizes)
  timed.add("all rows in one product", lambda a, b: a.T @ b, left, right)
  found = timed.seconds(rows)
  plain = found["all rows in one product"]
  report.claim("experts: groups / all rows in one product", found["groups"], plain)


def cache(report: common.Report, options: argparse.Namespace) -> None:
  """Attention of newest positions to a cache, in the kernel and by XLA."""
  batch, heads, room = cached_attention.BATCH, cached_attention.HEADS, cached_attention.KEYS
  for beams in cached_attention.BEAMS:
    query = drawn(0, batch, beams, heads, HEAD_DIM)
    key, value = drawn(1, batch, heads, HEAD_DIM, room), drawn(2, batch, heads, room, HEAD_DIM)
    bias = jnp.zeros((1, 1, 1, room))
    for filled in (room // 8, room // 2, room):
      name = f"cache, {beams} queries, {filled} of {room} keys written"
      args = (query, key, value, bias, jnp.int32(filled))
      exact = (*(one.astype(jnp.float32) for one in args[:3]), *args[3:])
      with jax.default_matmul_precision("highest"):
        truth = jax.jit(attend_to_cache)(*exact)
      error = relative_error(jax.jit(attend_to_cache_on_gpu)(*args), truth)
      report.claim(f"error, {name}", error, 1.0, at_most=MOST_ERROR["bfloat16"])
      timed = Timed(report, name, 5 if options.quick else 20)
      for way, function in cached_attention.WAYS.items():
        timed.add(way, function, *args)
      found = timed.seconds(batch * beams)
      if len(found) > 1:
        report.claim(f"{name}: kernel's time / XLA's", found["kernel"], found["XLA"])


def text(report: common.Report, options: argparse.Namespace) -> None:
  """A training step of GPT-2 Small on one long text."""
  length = 1024 if options.quick else 8192
  runs = {}
  for compete in (False, True):
    name = "heads compete" if compete else "plain"
    step, initial = long_text.program(length, compete)
    state = jax.jit(initial)()
    tokens = jax.random.randint(jax.random.key(0), (1, length), 0, long_text.VOCABULARY)
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(*state, tokens).compile()
    gigabytes = long_text.planned(compiled)
    report.claim(f"{length:,} tokens, {name}: GB planned", gigabytes, 1.0, at_most=16.0)
    runs[name] = _stepping(compiled, state, tokens)
  found = report.measure(
    f"GPT-2 Small, one text of {length:,}", runs, 10, amount=length, unit="tokens"
  )
  report.claim("GPT-2 Small: heads compete / plain", found["heads compete"], found["plain"])
  peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0) / 1e9
  report.note(f"GB that were ever in use, both models' states at once: {peak:.1f}")


def _stepping(compiled: Any, state: Any, tokens: jax.Array) -> Callable[[], None]:
  def run() -> None:
    nonlocal state
    *state, loss = compiled(*state, tokens)
    jax.block_until_ready(loss)

  return run


def main() -> None:
  parser = common.options(__doc__, ("gpu",))
  parser.set_defaults(device="gpu")
  parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="these parts alone")
  parser.add_argument("--share", default="0/1", metavar="I/N", help="every Nth check, from the Ith")
  options = parser.parse_args()
  report = common.start("Attention and competition on a GPU", options)
  devices.attached()
  parts = (check, attention, tiles, layers, experts, cache, text)
  for name, part in zip(PARTS, parts, strict=True):
    if name in options.only:
      part(report, options)
      report.save()
  report.finish()


if __name__ == "__main__":
  main()
