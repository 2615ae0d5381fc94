"""Compares two revisions by what their programs write: the same arithmetic gives the same bits.

    python -m benchmarks.identical --base v0.1.0
    python -m benchmarks.identical --base HEAD~3 --only translation recoding --json results.json

Every case trains a tiny model of one kind for a few steps by `train.main` and then uses it by other
programs, first in a checkout of `--base`, then in this working tree, with the same interpreter, one
after the other. Only commands that the README documents are used, so that a revision whose inside
differs can still be compared. What must agree: losses, norms and scores in `metrics.jsonl` and
`results.json`, the arrays of the kept model and of the last checkpoint, and all that the other
programs print to standard output. Times, dates, versions and paths are left out.

With `--open`, programs of this tree also use and continue the workdirs that the base left.

Exit status: 0 if all cases agree, 1 if one differs or fails.
"""

import argparse
import contextlib
import dataclasses
import hashlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import describe, machine

ROOT = Path(__file__).parents[1]
STEPS = 6
# Names of what a clock, the machine or the place of a folder decides.
_LEFT_OUT = re.compile(
  r"second|time|date|per_s|waited|memory|gib|flop|mfu|provenance|workdir|command|path|host"
  r"|version|eta|fingerprint|history|ended|measured|configuration|cache|compilations",
  re.IGNORECASE,
)
_SMALL_WORLDS = {"train": 240, "valid": 24, "test": 24, "shifted": 24}
_SMALL_GRAMMAR = {"train": 300, "valid": 20, "test": 20, "shifted": 20}


@dataclasses.dataclass(frozen=True)
class Use:
  """A program that uses the trained model.

  Attributes:
    program: name of the module in `train`.
    options: what stands behind `--workdir W`.
    lines: its standard input.
  """

  program: str
  options: tuple[str, ...] = ()
  lines: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Case:
  """A model that is trained and used.

  Attributes:
    config: the configuration, with its variant.
    fields: overrides of its fields.
    uses: programs that are run after training.
  """

  config: str
  fields: Mapping[str, object]
  uses: tuple[Use, ...]


def _translation(**fields: object) -> Case:
  sizes = {"encoder_layers": 2, "decoder_layers": 2, "dim": 32, "heads": 4, "ffn_dim": 64}
  lines = ("Der Hund schläft .", "Die Katze sieht einen alten Vogel .", "")
  return Case(
    "configs/nmt_cah.py",
    {
      **{f"task.data.{name}": value for name, value in _SMALL_GRAMMAR.items()},
      "task.batch.tokens": 512,
      "task.tokenizer.vocab_size": 400,
      "task.target_tokenizer.vocab_size": 300,
      **{f"model.{name}": value for name, value in sizes.items()},
      **fields,
    },
    (
      Use("predict", ("--scores", "--quiet"), lines),
      Use("predict", ("--method", "greedy", "--quiet"), lines),
      Use("evaluate", ("--split", "attractor")),
    ),
  )


def _recurrent(**fields: object) -> Case:
  return Case(
    "configs/lm_recoding.py",
    {
      **{f"task.data.grammar.{name}": value for name, value in _SMALL_GRAMMAR.items()},
      "phases.0.epochs": 0,
      "task.rows": 8,
      "task.length": 12,
      "task.tokenizer.vocab_size": 300,
      "model.dim": 24,
      "model.embedding_dim": 24,
      **fields,
    },
    (
      Use("evaluate", ("--split", "test")),
      Use("evaluate", ("--split", "test", "--recoding", "signal=none")),
    ),
  )


def _modulated(config: str, **fields: object) -> Case:
  question = "Anna took the ball. Anna went to the hall. | Where is the ball?"
  sizes = {"dim": 32, "ffn_dim": 64, "heads": 4}
  data = {f"task.data.seeds.0.{name}": value for name, value in _SMALL_WORLDS.items()}
  return Case(
    config,
    {**data, **{f"model.{name}": value for name, value in sizes.items()}, **fields},
    (Use("predict", ("--scores", "--quiet"), (question, "")), Use("evaluate", ("--split", "test"))),
  )


CASES: dict[str, Case] = {
  "translation": _translation(),
  "translation, plain": _translation(**{"model.compete": ()}),
  "translation, all options": _translation(
    **{
      "model.compete": ("encoder_self", "decoder_self", "cross"),
      "model.competition.rule": "top_k",
      "model.competition.keep": 2,
      "model.competition.balance": 0.01,
      "model.expert_layers": ("encoder", "decoder_1"),
      "model.experts.count": 4,
      "model.experts.competition.rule": "top_k",
      "model.experts.competition.keep": 2,
      "model.experts.competition.z": 0.001,
      "model.drophead.schedule": "v",
      "micro_batches": 2,
    }
  ),
  "masked": Case(
    "configs/mlm_cah.py:grammar",
    {
      **{f"task.data.grammar.{name}": value for name, value in _SMALL_GRAMMAR.items()},
      "task.batch_tokens": 512,
      "task.tokenizer.vocab_size": 300,
      "model.encoder_layers": 2,
      "model.dim": 32,
      "model.ffn_dim": 64,
    },
    (
      Use("predict", ("--top", "3", "--quiet"), ("The <mask> sleeps .",)),
      Use("evaluate", ("--split", "test")),
    ),
  ),
  "recoding": _recurrent(),
  "recoding, learned through": _recurrent(
    **{
      "model.recoding.step": "learned",
      "model.recoding.through": True,
      "model.recoding.signal": "nll",
    }
  ),
  "recoding, mc dropout": _recurrent(
    **{"model.recoding.signal": "mc_dropout", "model.recoding.samples": 2}
  ),
  "language model": Case(
    "configs/nemot_pretrain.py:grammar",
    {
      **{f"task.data.grammar.{name}": value for name, value in _SMALL_GRAMMAR.items()},
      "task.batch_tokens": 520,
      "task.tokenizer.vocab_size": 300,
      "model.dim": 32,
      "model.ffn_dim": 64,
    },
    (Use("evaluate", ("--split", "test")),),
  ),
  "questions": _modulated("configs/nemot_qa.py"),
  "everything": _modulated("configs/everything.py"),
}


def main(argv: Sequence[str] | None = None) -> int:
  """Runs all cases in both trees and compares them."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--base", required=True, help="revision to compare this tree with")
  parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), metavar="CASE")
  parser.add_argument("--open", action="store_true", help="also go on with the base's workdirs")
  parser.add_argument("--json", type=Path, help="also write what was found to this file")
  args = parser.parse_args(argv)
  found: dict[str, dict[str, list[str]]] = {}
  this = machine("cpu")
  print(f"{args.base} and this tree on {describe(this)}", flush=True)
  with tempfile.TemporaryDirectory() as name, _checkout(args.base, Path(name)) as base:
    for number, case in enumerate(args.only, 1):
      began = time.monotonic()
      found[case] = _compare(CASES[case], base, Path(name) / re.sub(r"\W+", "-", case), args.open)
      agree = not any(found[case].values())
      seconds = time.monotonic() - began
      verdict = "identical" if agree else "DIFFERENT"
      print(f"{number}/{len(args.only)} {case}: {verdict} ({seconds:.0f} s)", flush=True)
      for what, lines in found[case].items():
        for line in lines[:8]:
          print(f"    {what}: {line}", flush=True)
  if args.json:
    record = {"base": args.base, "machine": this, "differences": found}
    args.json.write_text(json.dumps(record, indent=1) + "\n")
  return int(any(lines for one in found.values() for lines in one.values()))


@contextlib.contextmanager
def _checkout(revision: str, folder: Path) -> Iterator[Path]:
  """A working tree of a revision, removed at the end."""
  place = folder / "base"
  subprocess.run(
    ["git", "worktree", "add", "--quiet", "--detach", str(place), revision], cwd=ROOT, check=True
  )
  try:
    yield place
  finally:
    subprocess.run(["git", "worktree", "remove", "--force", str(place)], cwd=ROOT, check=True)


def _compare(case: Case, base: Path, folder: Path, opening: bool) -> dict[str, list[str]]:
  """Differences by what they were found in; empty lists where there are none."""
  runs = {"base": base, "this": ROOT}
  left, right = (
    dict[str, Any](train=_train(case, tree, folder / name)) for name, tree in runs.items()
  )
  for found, (name, tree) in zip((left, right), runs.items(), strict=True):
    for number, use in enumerate(case.uses):
      found[f"{use.program} {number}"] = _use(use, tree, folder / name)
  if opening:
    for number, use in enumerate(case.uses):
      what = f"{use.program} {number}, base's workdir"
      left[what] = left[f"{use.program} {number}"]
      right[what] = _use(use, ROOT, folder / "base")
  found = {what: list(_differences(left[what], right[what])) for what in left}
  shutil.rmtree(folder)
  return found


def arguments(case: Case, workdir: Path, steps: int = STEPS) -> list[str]:
  """Those of `train.main` for a case."""
  fields = {
    "phases.0.steps": steps,
    "evaluate_every": max(1, steps // 2),
    "evaluate_sentences": 8,
    "log_every": 1,
    "time_limit_minutes": 0,
    **case.fields,
  }
  found = ["--config", case.config, "--workdir", str(workdir)]
  for name, value in fields.items():
    if isinstance(value, tuple):
      found += [f"--config.{name}", *value]
    else:
      found.append(f"--config.{name}={value}")
  return found


def _train(case: Case, tree: Path, workdir: Path) -> dict[str, Any]:
  """What training leaves in a workdir."""
  _run(tree, "main", arguments(case, workdir))
  lines = (workdir / "metrics.jsonl").read_text().splitlines()
  return {
    "metrics": [_measured(json.loads(line)) for line in lines],
    "results": _measured(json.loads((workdir / "results.json").read_text())),
    "arrays": _hashes(workdir / "models" / "best") | _hashes(workdir / "checkpoints"),
  }


def _use(use: Use, tree: Path, workdir: Path) -> list[str]:
  """What a program prints about a model, without what a clock decides."""
  shown = _run(tree, use.program, ["--workdir", str(workdir), *use.options], use.lines)
  lines, timed = [], False
  for line in shown.replace(str(workdir), "W").splitlines():
    timed = bool(re.search(r"sentences/s$", line)) or (timed and bool(line.strip()))
    line = re.sub(r"\S+$", "", line) if timed else line
    if not re.search(r"second|/s\b|report:", line):
      lines.append(line.rstrip())
  return lines


def _run(tree: Path, program: str, arguments: Sequence[str], lines: Sequence[str] = ()) -> str:
  """Standard output of a program of `train`."""
  environment = {**os.environ, "PYTHONPATH": str(tree), "JAX_PLATFORMS": "cpu"}
  done = subprocess.run(
    [sys.executable, "-m", f"train.{program}", *arguments],
    cwd=tree,
    env=environment,
    input="".join(f"{line}\n" for line in lines),
    capture_output=True,
    text=True,
    check=False,
  )
  if done.returncode:
    raise SystemExit(
      f"train.{program} of {tree} ended with status {done.returncode}:\n{done.stderr[-2000:]}"
    )
  return done.stdout


def _measured(value: Any) -> Any:
  """The value without the entries that are left out."""
  if isinstance(value, dict):
    return {k: _measured(v) for k, v in value.items() if not _LEFT_OUT.search(k)}
  if isinstance(value, list):
    return [_measured(one) for one in value]
  return value


def _hashes(folder: Path) -> dict[str, str]:
  """SHA-256 of the files that hold arrays."""
  return {
    str(path.relative_to(folder.parent)): hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    for path in sorted(folder.rglob("*.safetensors"))
  }


def _differences(left: Any, right: Any, path: str = "") -> Iterator[str]:
  """Where two nested values differ; what only the right one has is new, and no difference."""
  if isinstance(left, dict) and isinstance(right, dict):
    for key in left:
      yield from _differences(left[key], right.get(key), f"{path}/{key}")
  elif isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
    for number, (one, other) in enumerate(zip(left, right, strict=True)):
      yield from _differences(one, other, f"{path}/{number}")
  elif left != right and not _both_nan(left, right):
    yield f"{path}: {_short(left)} in the base, {_short(right)} here"


def _both_nan(left: Any, right: Any) -> bool:
  numbers = isinstance(left, float) and isinstance(right, float)
  return numbers and math.isnan(left) and math.isnan(right)


def _short(value: Any) -> str:
  text = repr(value)
  return text if len(text) <= 80 else f"{text[:77]}..."


if __name__ == "__main__":
  sys.exit(main())
