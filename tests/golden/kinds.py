"""Makes a golden model of every kind, and the numbers that follow from it.

    python tests/golden/kinds.py [KIND ...]

Run it only for a kind that is not there yet, or for a new schema version, which then gets files of
its own beside the old ones: what is here must go on opening and giving the same numbers. Models are
those of `benchmarks.identical`, smaller still, after a few steps.
"""

import json
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

KINDS = Path(__file__).parent / "kinds"
ROOT = Path(__file__).parents[2]
SMALL = {"model.dim": 16, "model.ffn_dim": 16}
RECURRENT = {"model.dim": 12, "model.embedding_dim": 12, "task.tokenizer.vocab_size": 120}
# Of `benchmarks.identical`, with what makes each smaller.
CASES: dict[str, dict[str, Any]] = {
  # All units stay: of fewer, the last bits would decide which, and these differ by machine.
  "translation, all options": SMALL
  | {"model.competition.keep": 4, "model.experts.competition.keep": 4},
  "masked": SMALL,
  "recoding": RECURRENT,
  "recoding, learned through": RECURRENT,
  "recoding, mc dropout": RECURRENT,
  "language model": SMALL,
  "questions": SMALL,
  "everything": SMALL,
}
DECODED = 3


def name_of(kind: str) -> str:
  """The name of a kind's archive."""
  return kind.replace(", ", "-").replace(" ", "-")


def numbers_of(folder: Path) -> dict[str, Any]:
  """What follows from a model folder: scores and outputs, terms of the objective, gradients."""
  import jax
  import jax.numpy as jnp
  import numpy as np

  import compmod_jax
  from compmod_jax.core import losses
  from compmod_jax.tasks.base import StepContext

  model = compmod_jax.load(folder)
  task: Any = model.task
  found = task.evaluate(model.params, "test", decode=DECODED)
  batches, _ = task.dataset.train_batches(seed=0, multiple=1)
  batch = {name: jnp.asarray(value) for name, value in next(batches).items()}
  context = StepContext(jax.random.key(0), jnp.int32(0), train=False)

  def objective(params: Any) -> tuple[jax.Array, Any]:
    terms, *_ = task.loss(params, task.model.init_carry(), batch, context)
    return losses.objective(terms), {name: term.logged() for name, term in terms.items()}

  (value, terms), gradient = jax.jit(jax.value_and_grad(objective, has_aux=True))(model.params)
  norms = {
    jax.tree_util.keystr(path, simple=True, separator="/"): float(np.linalg.norm(leaf.ravel()))
    for path, leaf in jax.tree_util.tree_flatten_with_path(jax.device_get(gradient))[0]
  }
  return {
    "values": {k: v for k, v in found.values.items() if isinstance(v, int | float)},
    "outputs": list(found.outputs),
    "objective": float(value),
    "terms": jax.tree.map(lambda leaf: np.asarray(leaf).tolist(), terms),
    "gradients": norms,
  }


def main() -> None:
  """Trains, measures and packs; with `GOLDEN_TREE`, with the code of another checkout."""
  from benchmarks import identical

  tree = Path(os.environ.get("GOLDEN_TREE", ROOT))
  environment = {**os.environ, "PYTHONPATH": str(tree), "JAX_PLATFORMS": "cpu"}
  environment.pop("XLA_FLAGS", None)
  record = KINDS / "expected.json"
  for kind in sys.argv[1:] or CASES:
    with tempfile.TemporaryDirectory() as name:
      run = Path(name) / "run"
      options = identical.arguments(identical.CASES[kind], run)
      options += [f"--config.{field}={value}" for field, value in CASES[kind].items()]
      train = [sys.executable, "-m", "train.main", *options]
      subprocess.run(train, cwd=tree, env=environment, check=True)
      measure = f"import json, kinds; print(json.dumps(kinds.numbers_of(kinds.Path({str(run)!r}))))"
      path = f"{Path(__file__).parent}{os.pathsep}{tree}"
      shown = subprocess.run(
        [sys.executable, "-c", measure],
        cwd=tree,
        env=environment | {"PYTHONPATH": path},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
      ).stdout
      expected = json.loads(record.read_text()) if record.exists() else {}
      expected[kind] = json.loads(shown.splitlines()[-1])
      record.write_text(json.dumps(expected, indent=1) + "\n")
      with tarfile.open(KINDS / f"{name_of(kind)}.tar.xz", "w:xz") as archive:
        for part in ("config.json", "tokenizers", "models/best"):
          archive.add(run / part, f"run/{part}", filter=_anonymous)


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
  member.uid = member.gid = member.mtime = 0
  member.uname = member.gname = ""
  return member


if __name__ == "__main__":
  sys.path.insert(0, str(ROOT))
  main()
