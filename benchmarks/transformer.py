"""Training and decoding speed of the Transformer beside PyTorch and Hugging Face, in one run.

    python -m benchmarks.transformer [--quick] [--json FILE] [--check] [--device gpu]

Needs the environment of `make test-peers`. Same shapes, parameters, batches and precision on both
sides, dropout on; PyTorch at its best: fused optimizer, fused attention, the faster of eager and
compiled; on CPU also products in bfloat16, in ours by `products`, in PyTorch by autocast, and bare
products of both libraries. Our step is the training program's whole step, with its metrics and its
checks for non-finite values. In full about 20 minutes on 2 cores, most of it compilation and 20
alternations of the largest model.
"""

import argparse
import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import common, products
from benchmarks.translation_case import Case
from compmod_jax.core.rounding import Products
from compmod_jax.data.tokenizers import BOS, EOS, PAD, UNK
from compmod_jax.decoding import DecodeConfig, decode
from compmod_jax.models.transformer import ATTENTION_KINDS, TransformerConfig
from compmod_jax.tasks.translation import Translation
from compmod_jax.training.optimizer import OptimizerConfig, learning_rate, make_optimizer
from compmod_jax.training.step import init_state, make_step, trainable_mask

ROUNDS = 20
RECIPE = TransformerConfig()
SMALL = TransformerConfig(encoder_layers=3, decoder_layers=3, dim=256, heads=4, ffn_dim=1024)
OPTIMIZER = OptimizerConfig(name="adam")


def our_step(case: Case, *, products: Products = "model", **changes: Any) -> Callable[[], None]:
  """A call that makes one training step, on a model with some options changed."""
  task = case.task(**changes)
  optimizer, rate = make_optimizer(OPTIMIZER, 10_000), learning_rate(OPTIMIZER, 10_000)
  state = init_state(jax.device_put(case.params(**changes)), (), optimizer, 0.0)
  state = jax.tree.map(jnp.array, state)  # donation needs buffers of its own for every leaf
  mask = trainable_mask(state.params, "all")
  step = make_step(task, optimizer, rate, micro_batches=1, ema=0.0, mask=mask, products=products)
  step, key = jax.jit(step, donate_argnums=0), jax.random.key(0)
  batch = jax.tree.map(jnp.asarray, case.batch())

  def run() -> None:
    nonlocal state
    state, found = step(state, batch, key)
    jax.block_until_ready((state, found))

  return run


def their_step(
  case: Case, *, compiled: bool, device: str, rounded: bool = False
) -> Callable[[], None]:
  """A call that makes the same step in PyTorch; `rounded`: products in bfloat16 (autocast)."""
  import torch
  import torch.nn.functional as F

  from benchmarks.peer_torch import Transformer

  place = "cuda" if device == "gpu" else "cpu"
  model = Transformer(case.model, case.source_vocab, case.target_vocab).to(place).train()
  c = OPTIMIZER
  optimizer = torch.optim.Adam(
    model.parameters(), lr=c.learning_rate, betas=(c.b1, c.b2), eps=c.eps, fused=True
  )
  batch = {k: torch.from_numpy(v).long().to(place) for k, v in case.batch().items()}
  shifted = F.pad(batch["target"], (1, 0), value=BOS)[:, :-1].contiguous()

  def loss(source: Any, shifted: Any, target: Any) -> Any:
    logits = model(source, shifted).flatten(0, 1)
    return F.cross_entropy(logits, target.flatten(), ignore_index=PAD, label_smoothing=0.1)

  loss = torch.compile(loss) if compiled else loss

  def run() -> None:
    optimizer.zero_grad(set_to_none=True)
    with _autocast(rounded or case.model.dtype == "bfloat16", device):
      value = loss(batch["source"], shifted, batch["target"])
    value.backward()
    optimizer.step()
    value.detach().item()  # waits for the device

  return run


def _autocast(rounded: bool, device: str) -> Any:
  import torch

  if not rounded:
    return contextlib.nullcontext()
  return torch.autocast("cuda" if device == "gpu" else "cpu", torch.bfloat16)


def training(report: common.Report, case: Case, target: float, *, competition: bool) -> None:
  """Our step against PyTorch's and, if asked for, competition against plain attention."""
  device, quick = report.options.device, report.options.quick
  runs = {
    "ours": our_step(case),
    "PyTorch eager": their_step(case, compiled=False, device=device),
  }
  if not quick:
    runs["PyTorch compiled"] = their_step(case, compiled=True, device=device)
  if device == "cpu" and not quick:
    runs["ours, products in bfloat16"] = our_step(case, products="bfloat16")
    for name, compiled in (("eager", False), ("compiled", True)):
      runs[f"autocast {name}"] = their_step(case, compiled=compiled, device=device, rounded=True)
  if competition:
    runs["ours, encoder heads compete"] = our_step(case, compete=("encoder_self",))
    runs["ours, all heads compete"] = our_step(case, compete=ATTENTION_KINDS)
  tokens = int(np.sum(case.batch()["target"] != PAD))
  seconds = report.measure(case.name, runs, ROUNDS, amount=tokens, unit="target tokens")
  best = min((name for name in runs if "PyTorch" in name), key=lambda n: np.median(seconds[n]))
  ours = seconds["ours"]
  report.claim(f"{case.name}: our time / {best}'s", ours, seconds[best], at_most=target)
  for name in runs:
    if "compete" in name:
      report.claim(f"{case.name}: {name[6:]} / plain", seconds[name], ours, at_most=1.05)
  if rounded := [name for name in runs if "autocast" in name]:
    half = seconds["ours, products in bfloat16"]
    report.claim(f"{case.name}: ours, products in bfloat16 / in float32", half, ours)
    best = min(rounded, key=lambda name: np.median(seconds[name]))
    report.claim(f"{case.name}: the same / PyTorch's in bfloat16, {best}", half, seconds[best])


def decoding(report: common.Report, case: Case, beams: int = 5) -> None:
  """Beam search with cached keys and values against Hugging Face's, outputs compared."""
  import torch

  from benchmarks.marian import peaked, to_marian

  task, source = case.task(), case.batch()["source"]
  # No hypothesis ends by itself, so that both sides make the same number of steps.
  params = peaked(case.params(), case.model, spread=4.0, stop=-100.0)
  marian = to_marian(params, case.model, case.source_vocab, case.target_vocab)
  place = "cuda" if report.options.device == "gpu" else "cpu"
  marian = marian.to(place, getattr(torch, case.model.dtype))
  search = jax.jit(functools.partial(_search, task, beams=beams, length=case.length))
  params, ids = jax.device_put(params), torch.from_numpy(source).long().to(place)
  found: dict[str, np.ndarray] = {}

  def ours() -> None:
    found["ours"] = np.asarray(search(params, source))[:, :, :-1]

  def theirs() -> None:
    with torch.no_grad():
      tokens = marian.generate(
        ids,
        attention_mask=(ids != PAD).long(),
        num_beams=beams,
        num_return_sequences=beams,
        length_penalty=1.0,
        early_stopping=True,
        max_length=case.length,
        suppress_tokens=[PAD, BOS, UNK],
      )
    found["theirs"] = tokens[:, 1:].cpu().numpy().reshape(case.rows, beams, -1)

  name = f"{case.name}, beam {beams}"
  runs = {"ours": ours, "Hugging Face": theirs}
  seconds = report.measure(name, runs, ROUNDS, amount=case.rows, unit="sentences")
  target = {} if report.options.device == "gpu" else {"at_least": 1.5}
  report.claim(f"{name}: our speed / theirs", seconds["Hugging Face"], seconds["ours"], **target)
  log_probs = jax.jit(functools.partial(_log_probs, task))
  mine, other = (np.sort(log_probs(params, source, found[side])) for side in ("ours", "theirs"))
  same = int(np.sum(np.all(np.abs(mine - other) < 0.01, axis=1)))
  report.note(f"{name}: {beams} hypotheses of the same log probabilities for {same} of {case.rows}")
  if case.model.dtype == "float32" and same < 0.9 * case.rows:
    raise RuntimeError("the two searches do not find the same")


def _log_probs(task: Translation, params: Any, source: Any, tokens: Any) -> jax.Array:
  """Log probability in nats of each hypothesis [batch, beams, length] of the sources.

  Random weights like to repeat a token, and hypotheses that differ only in where another one stands
  are tied to rounding: what both searches must agree on is how probable their finds are.
  """
  batch, beams, length = tokens.shape
  flat = {
    "source": jnp.repeat(source, beams, axis=0),
    "target": tokens.reshape(batch * beams, length),
  }
  logits = jax.nn.log_softmax(task.model.forward(params, flat))
  found = jnp.take_along_axis(logits, flat["target"][..., None], axis=-1)
  return found.sum((1, 2)).reshape(batch, beams)


def _search(task: Translation, params: Any, source: Any, *, beams: int, length: int) -> jax.Array:
  """The hypotheses' tokens [batch, beams, length]."""
  model, variables = task.model.module, {"params": params}
  config = DecodeConfig(beams=beams, n_best=beams, max_ratio=0.0, max_extra=length)
  cache = model.apply(variables, source, beams=beams, length=length, method="prefill")
  step: Any = functools.partial(model.apply, variables, method="step")
  return decode(
    step,
    cache,
    config,
    batch=source.shape[0],
    max_length=length,
    limit=config.limits(jnp.sum(source != PAD, axis=1), length),
    bos=BOS,
    eos=EOS,
    forbidden=(PAD, BOS, UNK),
  ).tokens


def compare_models(report: common.Report, case: Case) -> None:
  """Checks that the peer computes what ours does."""
  import torch

  from benchmarks.peer_torch import Transformer, copy_params

  params, batch = case.params(), case.batch()
  ours = np.asarray(jax.jit(case.task().model.forward)(params, batch))
  peer = Transformer(case.model, case.source_vocab, case.target_vocab).eval()
  copy_params(peer, params)
  ids = {k: torch.from_numpy(v).long() for k, v in batch.items()}
  shifted = torch.nn.functional.pad(ids["target"], (1, 0), value=BOS)[:, :-1]
  with torch.no_grad():
    theirs = peer(ids["source"], shifted).numpy()
  real = batch["target"] != PAD
  difference = float(np.abs(ours - theirs)[real].max())
  report.note(f"{case.name}: logits differ by {difference:.1e} at most on the same weights")
  if case.model.dtype == "float32" and difference > 1e-3:
    raise RuntimeError("the PyTorch model is not ours")


def main() -> None:
  parser = common.options(__doc__)
  parts = ("training", "decoding")
  parser.add_argument("--only", choices=parts, help="measure this part alone")
  options = parser.parse_args()
  report = common.start("Transformer against PyTorch", options)
  wanted = (options.only,) if options.only else parts
  gpu = options.device == "gpu"
  target = 1.0 if gpu else 0.9
  for case in cases(options):
    compare_models(report, case)
    if "training" in wanted:
      training(report, case, target, competition=case.model.dim == RECIPE.dim)
      if not gpu:
        products.compare(report, case.products())
  last = cases(options)[-1]
  if "decoding" in wanted:
    rows = 8 if options.quick else 32
    named = f"{last.name.split(',')[0]}, {rows} sentences"
    decoding(report, dataclasses.replace(last, name=named, rows=rows))
  report.finish()


def cases(options: argparse.Namespace) -> list[Case]:
  """What is measured, the recipe's model last."""
  dtype = "bfloat16" if options.device == "gpu" else "float32"
  small = dataclasses.replace(SMALL, dtype=dtype)
  recipe = dataclasses.replace(RECIPE, dtype=dtype)
  if options.quick:
    thin = dataclasses.replace(recipe, encoder_layers=1, decoder_layers=1)
    return [Case("recipe's widths, 1 + 1 layers, 32 x 32", thin, 32, 32, 1000, 1000)]
  scale = 4 if options.device == "gpu" else 1
  return [
    Case(f"small model, {128 * scale} x 16", small, 128 * scale, 16),
    Case(f"recipe, {64 * scale} x 32", recipe, 64 * scale, 32),
  ]


if __name__ == "__main__":
  main()
