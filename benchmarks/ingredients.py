"""What options of systematic generalisation cost: a training step with each beside the plain step.

    python -m benchmarks.ingredients [--quick] [--only NAME ...] [--json FILE] [--device gpu]

One encoder-decoder and one batch for all, float32, dropout on; the training program's whole step.
Steps are timed in turn, and ratios taken round by round. Most of the time is compilation. "As many
parameters" has feed-forward networks that are so much narrower, as rows of the tables have.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from benchmarks import common
from benchmarks.transformer import our_step
from benchmarks.translation_case import Case
from compmod_jax.data.tokenizers import PAD
from compmod_jax.layers.experts import ExpertsConfig
from compmod_jax.mechanisms.competition.router import CompetitionConfig
from compmod_jax.models.transformer import ATTENTION_KINDS, TransformerConfig

ROUNDS = 15
PLAIN = TransformerConfig(
  encoder_layers=2, decoder_layers=2, dim=128, heads=4, ffn_dim=256, max_length=64, dropout=0.1
)
SMALL: dict[str, Any] = {"dim": 32, "ffn_dim": 64, "encoder_layers": 1, "decoder_layers": 1}
MOH = CompetitionConfig(rule="top_k", keep=2, shared_heads=1, balance=0.01)
CHOICE = CompetitionConfig(rule="top_k", keep=2, weighting="normalised_sigmoid", bias_balance=0.001)
EXPERTS: dict[str, Any] = {
  "expert_layers": ("encoder", "decoder"),
  "experts": ExpertsConfig(7, matched=True, competition=CHOICE, shared=1),
}
ROUTER: dict[str, Any] = {"positions": "none", "attention_form": "geometric", "copy_gate": True}
INGREDIENTS: dict[str, dict[str, Any]] = {
  "no positions": {"positions": "none"},
  "rotary positions": {"positions": "rotary"},
  "relative positions": {"positions": "relative"},
  "penalties on distances": {"positions": "alibi"},
  "random labels": {"random_positions": 256},
  "a sliding window of 8": {"sliding_window": 8},
  "a shared layer": {"shared_layers": 1},
  "a shared layer, depth drawn": {"shared_layers": 1, "fewest_repeats": 1},
  "copy gates": {"copy_gate": True},
  "geometric attention": {"positions": "none", "attention_form": "geometric"},
  "Neural Data Router": {**ROUTER, "shared_layers": 1},
  "hypernetwork attention": {"attention_form": "hyla"},
  "differential attention": {"attention_form": "differential"},
  "gated heads": {"gated_heads": ATTENTION_KINDS},
  "competing heads": {"compete": ATTENTION_KINDS},
  "competing heads, as many parameters": {"compete": ATTENTION_KINDS, "ffn_dim": 144},
  "experts, one of them shared": EXPERTS,
  "mixture of depths": {"depth_layers": ("encoder", "decoder")},
  "SwitchHead": {"switch_heads": ATTENTION_KINDS},
  "MoH": {"compete": ATTENTION_KINDS, "competition": MOH},
  "MoH, as many parameters": {"compete": ATTENTION_KINDS, "competition": MOH, "ffn_dim": 144},
}
BOUNDED = (
  *("no positions", "rotary positions", "relative positions", "penalties on distances"),
  *("random labels", "a sliding window of 8", "copy gates", "gated heads"),
  *("competing heads, as many parameters", "MoH, as many parameters"),
)
"""Positions, gates and routers, which should cost little."""
QUICK = ("copy gates", "geometric attention", "hypernetwork attention")


def main() -> None:
  parser = common.options(__doc__)
  parser.add_argument(
    "--only", nargs="+", choices=INGREDIENTS, metavar="NAME", help="these options alone"
  )
  options = parser.parse_args()
  report = common.start("Options of systematic generalisation", options)
  measure(report, options.only or (QUICK if options.quick else INGREDIENTS), quick=options.quick)
  report.finish()


def measure(report: common.Report, names: Iterable[str], *, quick: bool) -> None:
  """Times the plain step and those with these options, and claims their ratios."""
  model = dataclasses.replace(PLAIN, **SMALL) if quick else PLAIN
  rows, length = (8, 16) if quick else (64, 32)
  case = Case("training", model, rows, length, source_vocab=200, target_vocab=200)
  runs = {"plain": our_step(case)}
  runs |= {name: our_step(case, **INGREDIENTS[name]) for name in names}
  tokens = int(np.sum(case.batch()["target"] != PAD))
  rounds = 3 if quick else ROUNDS
  seconds = report.measure(case.name, runs, rounds, amount=tokens, unit="target tokens")
  for name in names:
    bound = {"at_most": 1.15} if name in BOUNDED and not quick else {}
    report.claim(f"{name} / plain", seconds[name], seconds["plain"], **bound)
  report.note(f"{rows} rows of {length} tokens, {jax.local_device_count()} devices")


if __name__ == "__main__":
  main()
