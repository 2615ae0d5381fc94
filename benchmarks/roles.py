"""What attention heads do in models of four kinds, every row of docs/roles.md, and the controls.

Run:      python -m benchmarks.roles masked gpt2 gpt2-text
          python -m benchmarks.roles tatoeba --workdirs tatoeba=runs/nmt_cah
Models:   masked     a masked language model of the grammar, trained for 5 minutes at most
          gpt2       a GPT-2 folder of random weights, which `transformers` writes, on the grammar
          gpt2-text  the same on $COMPMOD_DATA/lm_public_domain
          grammar    a translation model of the grammar, trained for 5 minutes at most
          tatoeba    a translation model of $COMPMOD_DATA/tatoeba_en_de, trained for an hour
          questions  NeMoT on questions about worlds, trained for half an hour

Each model is made in FOLDER/NAME, unless its workdir holds one already, and read by `train.analyse
roles`. The report is in FOLDER/NAME/roles; its figures go to RESULTS/NAME.json. What follows `--`
is given to `train.main`. gpt2 needs the environment of `make test-peers` and
$COMPMOD_DATA/gpt2_vocab.
"""

import argparse
import collections
import json
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from compmod_jax.analysis.heads.specialisation import spearman
from compmod_jax.data.tokenizers.gpt2 import END, MERGES, VOCAB, read_gpt2_tokenizer

TRAINED = {
  "masked": "configs/mlm_cah.py:grammar",
  "grammar": "configs/nmt_cah.py:grammar",
  "tatoeba": "configs/nmt_cah.py:tatoeba",
  "questions": "configs/nemot_qa.py:worlds",
}
"""Name of a model -> the configuration that it is trained by."""
RANDOM = {"gpt2": "", "gpt2-text": "$COMPMOD_DATA/lm_public_domain"}
"""Name of a GPT-2 of random weights -> the text that it reads; none: the grammar."""
PLACES = ("previous", "itself", "next", "first", "separator", "rarest")
_TOKENS, _ALPHABET = 2000, 256


def main(argv: Sequence[str]) -> None:
  end = argv.index("--") if "--" in argv else len(argv)
  args, training = _options(argv[:end]), argv[end + 1 :]
  for name in args.models:
    made = args.workdirs.get(name, args.folder / name)
    commands = [] if _holds_model(made) else _make(name, args.folder / name, training)
    report = args.folder / name / "roles"
    began = time.perf_counter()
    commands.append(_run(_analysis(args, made, report)))
    found = summary(json.loads((report / "result.json").read_text()))
    found["seconds"] = round(time.perf_counter() - began)
    found["commands"] = [_without_places(one, made, args.folder / name) for one in commands]
    args.results.mkdir(parents=True, exist_ok=True)
    path = args.results / f"{name}.json"
    path.write_text(json.dumps({"name": name, **found}, indent=1) + "\n")
    print(f"{path} has the figures of {report / 'report.html'}")


def _options(argv: Sequence[str]) -> argparse.Namespace:
  parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
  parser.add_argument("models", nargs="+", choices=[*TRAINED, *RANDOM])
  parser.add_argument("--folder", type=Path, default=Path("runs/roles"))
  parser.add_argument("--results", type=Path, default=Path("results/roles"))
  parser.add_argument("--workdirs", nargs="*", default=[], metavar="NAME=PATH")
  parser.add_argument("--sentences", type=int, default=2000)
  parser.add_argument("--importance", type=int, default=250)
  parser.add_argument("--prices", type=float, nargs="*", default=[0.001, 0.003, 0.01, 0.03])
  parser.add_argument("--updates", type=int, default=300)
  args = parser.parse_args(argv)
  pairs = [pair.partition("=")[::2] for pair in args.workdirs]
  args.workdirs = {name: Path(path) for name, path in pairs}
  return args


def _holds_model(folder: Path) -> bool:
  return (folder / "model.json").is_file() or (folder / "models").is_dir()


def _make(name: str, place: Path, training: Sequence[str]) -> list[str]:
  """Makes a model; the commands."""
  if name in TRAINED:
    return [_run(["train.main", "--config", TRAINED[name], "--workdir", str(place), *training])]
  theirs = place.with_name(f"{place.name}-theirs")
  write_random_gpt2(theirs)
  data = ["--data", RANDOM[name]] if RANDOM[name] else []
  return [_run(["train.convert", "--huggingface", str(theirs), "--workdir", str(place), *data])]


def _analysis(args: argparse.Namespace, workdir: Path, report: Path) -> list[str]:
  numbers = {"sentences": args.sentences, "importance": args.importance}
  if args.prices:
    numbers["prune.updates"] = args.updates
  options = [part for key, value in numbers.items() for part in (f"--{key}", str(value))]
  prices = ["--prune.prices", *map(str, args.prices)] if args.prices else []
  places = ["--workdir", str(workdir), "--split", "test", "--output", str(report)]
  return ["train.analyse", "roles", *places, *options, *prices, "--quiet"]


def _run(command: Sequence[str]) -> str:
  """Runs a program of ours, and ends with its status if it fails; the command as it is typed."""
  shown = shlex.join(["python", "-m", *command])
  print(shown, flush=True)
  status = subprocess.run([sys.executable, "-m", *command], check=False).returncode
  if status:
    sys.exit(status)
  return shown


def _without_places(command: str, workdir: Path, folder: Path) -> str:
  for place, name in ((f"{folder}-theirs", "THEIRS"), (f"{folder / 'roles'}", "REPORT")):
    command = command.replace(place, name)
  return command.replace(str(workdir), "W").replace(str(folder), "W")


def write_random_gpt2(
  folder: Path, vocabulary: str = "$COMPMOD_DATA/gpt2_vocab", tokens: int = _TOKENS, seed: int = 0
) -> None:
  """A folder that `transformers` writes: 4 layers of width 128 with 4 heads, random weights.

  Its tokenizer has the first of GPT-2's tokens, which the first of its merges make, and its end.

  Args:
    folder: where.
    vocabulary: folder with GPT-2's tokenizer.
    tokens: how many.
    seed: of the weights.
  """
  import torch
  import transformers

  state = json.loads(read_gpt2_tokenizer(vocabulary).to_bytes())["model"]
  pieces = [*state["pieces"][: tokens - 1], END]
  merges = state["merges"][: tokens - 1 - _ALPHABET]
  with tempfile.TemporaryDirectory() as parts:
    ids = {piece: number for number, piece in enumerate(pieces)}
    (Path(parts) / VOCAB).write_text(json.dumps(ids), "utf-8")
    (Path(parts) / MERGES).write_text("\n".join(["#version: 0.2", *merges]) + "\n", "utf-8")
    transformers.GPT2TokenizerFast.from_pretrained(parts).save_pretrained(folder)
  torch.manual_seed(seed)
  config = transformers.GPT2Config(
    vocab_size=tokens,
    n_positions=128,
    n_embd=128,
    n_layer=4,
    n_head=4,
    bos_token_id=tokens - 1,
    eos_token_id=tokens - 1,
  )
  transformers.GPT2LMHeadModel(config).save_pretrained(folder, safe_serialization=True)


# Figures of a report.


def summary(data: Mapping[str, Any]) -> dict[str, Any]:
  """The figures of a report on roles, every row beside its controls.

  Args:
    data: what `result.json` of a report holds.
  """
  host = data["provenance"]["host"]
  kept = ("split", "examples", "examples_of_importance", "summary")
  return {
    "machine": f"{host['cpu']}, {host['cores']} cores",
    "date": data["provenance"]["date"][:10],
    "packages": data["provenance"]["packages"],
    **{key: data[key] for key in kept},
    "heads": len(data["roles"]),
    "roles": _role_counts(data),
    "looks": {name: _best(data, name, _share) for name in PLACES},
    "relations": {name: _best(data, name, _gain) for name in _relations(data)},
    "entropy": _ranges(data, lambda look: look["entropy"])
    | {"uniform": _range([m["halves"][0]["entropy_of_uniform"] for m in data["modules"].values()])},
    "weight_on_separators": _ranges(data, lambda look: look["weight"]["separator"]),
    "gradient_at_separators": _ranges(data, _relative_gradient),
    "divergence": {
      name: {"trained": _pairs(group["divergence"]), "untrained": _pairs([group["untrained"]])}
      for name, group in data["groups"].items()
    },
    "importance": _importance(data["importance"]["halves"]),
    "pruning": [{k: v for k, v in one.items() if k not in ("gates", "kept")} | _left(data, one)
                for one in data["pruning"]],
    "spectra": {
      name: {kind: _ranks(spectra[kind]) for kind in ("heads", "together")}
      for name, spectra in (
        (name, {k: [one[k] for one in of.values()] for k in ("heads", "together")})
        for name, of in data["spectra"].items()
      )
      if spectra["heads"]
    },
  }  # fmt: skip


def _role_counts(data: Mapping[str, Any]) -> dict[str, dict[str, int]]:
  """Role -> heads that have it, in the model and in its controls."""
  found: dict[str, dict[str, int]] = collections.defaultdict(dict)
  for source in ("kind", "shuffled", "untrained"):
    given = [role[source].partition(":")[0] for role in data["roles"].values() if source in role]
    for role in ("positional", "syntactic", "rare", "other"):
      found[role]["model" if source == "kind" else source] = given.count(role)
  return dict(found)


def _relations(data: Mapping[str, Any]) -> list[str]:
  return [one for one in data["relations"] if any(_has(m, one) for m in data["modules"].values())]


def _has(module: Mapping[str, Any], target: str) -> bool:
  return all(target in half["shares"] for half in module["halves"])


def _share(look: Mapping[str, Any], target: str, shuffled: bool) -> np.ndarray:
  return np.asarray(look["shuffled" if shuffled else "shares"][target])


def _gain(look: Mapping[str, Any], target: str, shuffled: bool) -> np.ndarray:
  return _share(look, target, shuffled) - look["best_offset"][target][1]


def _best(
  data: Mapping[str, Any], target: str, value: Callable[[Mapping[str, Any], str, bool], np.ndarray]
) -> dict[str, Any] | None:
  """The head with the largest value at a target, in the half where it is less, and the controls'.

  None where no query may read such a target.
  """
  modules = {name: one for name, one in data["modules"].items() if _has(one, target)}
  if not modules:
    return None
  values = {
    (name, head): float(least)
    for name, one in modules.items()
    for head, least in enumerate(
      np.min([value(half, target, False) for half in one["halves"]], axis=0)
    )
  }
  name, head = max(values, key=lambda key: values[key])
  halves = modules[name]["halves"]
  before = [one["untrained"] for one in modules.values() if one["untrained"] is not None]
  before = [look for look in before if target in look["shares"]]
  found: dict[str, Any] = {
    "head": f"{name}:{head}",
    "value": values[name, head],
    "share": float(np.mean([half["shares"][target][head] for half in halves])),
    "chance": float(np.mean([half["chance"][target] for half in halves])),
    "queries": sum(half["queries"][target] for half in halves),
    "shuffled": max(
      float(np.min([value(half, target, True) for half in one["halves"]], axis=0).max())
      for one in modules.values()
    ),
    "untrained": max((float(value(look, target, False).max()) for look in before), default=None),
  }
  if target in halves[0]["best_offset"]:
    found["best_offset"] = float(np.mean([half["best_offset"][target][1] for half in halves]))
  return found


def _range(values: Any) -> list[float]:
  flat = np.ravel(np.asarray(values, float))
  flat = flat[np.isfinite(flat)]
  return [float(flat.min()), float(flat.max())] if len(flat) else []


def _ranges(
  data: Mapping[str, Any], value: Callable[[Mapping[str, Any]], Any]
) -> dict[str, list[float]]:
  """Smallest and largest over heads: of the model, mean of the halves, and of the untrained one."""
  modules = data["modules"].values()
  trained = [np.mean([value(half) for half in one["halves"]], axis=0) for one in modules]
  before = [value(one["untrained"]) for one in modules if one["untrained"] is not None]
  return {
    name: _range(np.concatenate([np.ravel(each) for each in of])) if of else []
    for name, of in (("trained", trained), ("untrained", before))
  }


def _relative_gradient(look: Mapping[str, Any]) -> np.ndarray:
  """Mean gradient at a weight on a separator, of that at one on a word; NaN where both are 0."""
  marks, words = (look["gradient"][kind] for kind in ("separator", "word"))
  if marks is None or words is None:
    return np.full(1, np.nan)
  with np.errstate(divide="ignore", invalid="ignore"):
    return np.asarray(marks, float) / np.asarray(words, float)


def _pairs(tables: Sequence[Any]) -> float | None:
  """Mean over every two heads, and over tables."""
  known = [np.asarray(table, float) for table in tables if table is not None]
  if not known or len(known[0]) < 2:
    return None
  return float(np.mean([table[np.tril_indices(len(table), -1)] for table in known]))


def _importance(halves: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
  """Correlations of the ways, and of the halves; and how nearly attributions add up."""
  if not halves:
    return None
  ways = halves[0]["ways"]
  flat = [
    {way: np.concatenate([np.ravel(v) for v in half["values"][way].values()]) for way in ways}
    for half in halves
  ]
  sums = {
    name: float(np.mean([np.sum(half["values"]["attribution"][name]) for half in halves]))
    for name in halves[0]["attributed"]
  }
  rises = {name: float(np.mean([half["attributed"][name] for half in halves])) for name in sums}
  return {
    "ways": ways,
    "correlations": np.mean([half["correlations"] for half in halves], axis=0).tolist(),
    "halves": {way: spearman(*(half[way] for half in flat)) for way in ways if len(flat) == 2},
    "loss": float(np.mean([half["loss"] for half in halves])),
    "attributions": sums,
    "rises": rises,
    "largest_ablation": float(np.mean([half["ablation"] for half in flat], axis=0).max()),
  }


def _left(data: Mapping[str, Any], one: Mapping[str, Any]) -> dict[str, Any]:
  """Roles of the heads that a price leaves."""
  kinds = [
    data["roles"][f"{name}:{head}"]["kind"]
    for name, kept in one["kept"].items()
    for head in np.flatnonzero(kept).tolist()
  ]
  return {"roles": dict(collections.Counter(kinds))}


def _ranks(spectra: Sequence[Any]) -> dict[str, Any]:
  """Mean rank at which 90 % of the squared singular values are reached, and of how many."""
  means = [np.atleast_2d(np.asarray(one, float)).mean(0) for one in spectra]
  ranks = [int(np.searchsorted(one, 0.9 - 1e-12)) + 1 for one in means]
  return {"rank": float(np.mean(ranks)), "range": _range(ranks), "of": len(means[0])}


if __name__ == "__main__":
  main(sys.argv[1:])
