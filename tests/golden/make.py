"""Makes the golden run: a workdir as this version leaves it, and the numbers that follow from it.

    python tests/golden/make.py

Run it only for a new schema version, which then gets files of its own beside the old ones: what is
here must go on opening. The run was trained on one CPU device; 400 of its 406 steps are kept.
"""

import json
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).parent
ROOT = GOLDEN.parents[1]
STEP = 400
KEPT = (
  "config.json",
  "metrics.jsonl",
  "tokenizers",
  f"checkpoints/step_{STEP:08d}",
  "models/best",
)
CONFIG = """
from compmod_jax.data.buckets import BatchConfig
from compmod_jax.data.sources.text import TextData
from compmod_jax.data.tokenizers import TokenizerConfig
from compmod_jax.decoding import DecodeConfig
from compmod_jax.models.transformer import TransformerConfig
from compmod_jax.tasks.translation import TranslationConfig
from compmod_jax.training.experiment import Experiment, Phase
from compmod_jax.training.optimizer import OptimizerConfig

def get_config(variant):
  return Experiment(
    name="golden",
    task=TranslationConfig(
      data=TextData(folder="$GOLDEN_DATA"),
      tokenizer=TokenizerConfig(kind="words", vocab_size=40),
      batch=BatchConfig(tokens=100, buckets=(6,)),
      decode=DecodeConfig(beams=2, max_ratio=1.0, max_extra=2),
    ),
    model=TransformerConfig(
      encoder_layers=1, decoder_layers=1, dim=8, heads=2, ffn_dim=16, max_length=16, norm="pre",
      dropout=0.1, share_embeddings="all", compete=("encoder_self",),
    ),
    optimizer=OptimizerConfig(
      learning_rate=2e-2, schedule="inverse_sqrt", warmup_steps=10, clip=1.0, weight_decay=0.01
    ),
    phases=(Phase(steps=406),),
    ema=0.9, evaluate_every=400, log_every=1, keep_models=0,
  )
"""


def environment() -> dict[str, str]:
  """Variables of the golden run: its data, and one CPU device."""
  kept = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
  return kept | {"GOLDEN_DATA": str(GOLDEN / "data"), "JAX_PLATFORMS": "cpu"}


def translations(folder: Path) -> list[list[Any]]:
  """[source, output, score] of every test sentence, by a model folder."""
  import compmod_jax

  sources = (GOLDEN / "data" / "test.de").read_text().splitlines()
  model = compmod_jax.load(folder)
  decode = model.task.dataset.config.decode
  found = model.task.generator(model.task.model, model.params, sources, decode)
  return [
    [source, best[0].text, best[0].score] for source, best in zip(sources, found, strict=True)
  ]


def main() -> None:
  """Trains and packs."""
  with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    (folder / "config.py").write_text(CONFIG)
    command = [sys.executable, "-m", "train.main", "--config", "config.py", "--workdir", "run"]
    subprocess.run(command, cwd=folder, env=environment() | {"PYTHONPATH": str(ROOT)}, check=True)
    run = folder / "run"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    expected = {
      kind: {line["step"]: line["loss"] for line in lines if line["kind"] == kind}
      for kind in ("train", "eval")
    }
    expected["train"] = {s: loss for s, loss in expected["train"].items() if s > STEP}
    record = {**expected, "translations": translations(run / "models" / "best")}
    (GOLDEN / "expected.json").write_text(json.dumps(record, indent=1) + "\n")
    kept = [line for line in lines if line["kind"] == "eval" and line["step"] <= STEP]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    with tarfile.open(GOLDEN / "run.tar.xz", "w:xz") as archive:
      for part in KEPT:
        archive.add(run / part, f"run/{part}", filter=_anonymous)


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
  member.uid = member.gid = member.mtime = 0
  member.uname = member.gname = ""
  return member


if __name__ == "__main__":
  os.environ["JAX_PLATFORMS"] = "cpu"
  os.environ["GOLDEN_DATA"] = str(GOLDEN / "data")
  sys.path.insert(0, str(ROOT))
  main()
