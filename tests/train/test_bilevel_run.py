"""Meta-learned routers through the training program: groups, micro-batches, resuming."""

import json
import shutil

import pytest
from programs import assert_same_bits, computed, metrics_of, state_of, train, write_data

import compmod_jax
from compmod_jax.data.buckets import BatchConfig
from compmod_jax.data.sources.text import TextData
from compmod_jax.data.tokenizers import TokenizerConfig
from compmod_jax.decoding import DecodeConfig
from compmod_jax.models.transformer import TransformerConfig
from compmod_jax.tasks.bilevel import BilevelConfig
from compmod_jax.tasks.translation import TranslationConfig
from compmod_jax.training.experiment import Experiment, Phase
from compmod_jax.training.optimizer import OptimizerConfig, ParamGroup

pytestmark = pytest.mark.usefixtures("one_device")
CONTENT = {"train": 60, "valid": 8, "test": 8}


def make_experiment(folder):
  """Routers have an optimizer of their own, and batches two micro-batches."""
  return Experiment(
    name="tiny",
    task=TranslationConfig(
      data=TextData(folder=str(folder)),
      tokenizer=TokenizerConfig(kind="words", vocab_size=40),
      batch=BatchConfig(tokens=64, buckets=(8,)),
      decode=DecodeConfig(method="greedy", max_ratio=1.0, max_extra=2),
      small_share=0.3,
      bilevel=BilevelConfig(steps=2, rate=0.5),
    ),
    model=TransformerConfig(
      encoder_layers=1, decoder_layers=1, dim=8, heads=2, ffn_dim=8, max_length=16, dropout=0.0,
      compete=("encoder_self",),
    ),
    optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=2),
    groups=(ParamGroup("routing", optimizer=OptimizerConfig(name="sgd", learning_rate=0.5)),),
    phases=(Phase("meta", steps=6),),
    ema=0.9,
    micro_batches=2,
    log_every=1,
    evaluate_every=3,
    checkpoint_every=2,
    keep_last=20,
  )  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """A finished run, and its experiment."""
  root = tmp_path_factory.mktemp("bilevel")
  experiment = make_experiment(write_data(root / "data", CONTENT))
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv("COMPMOD_CACHE", str(root / "cache"))
    train(experiment, root / "run")
    yield root / "run", experiment


def test_a_run_logs_both_parts_is_scored_as_others_and_is_opened(run):
  workdir, _ = run
  lines = metrics_of(workdir, "train")
  expected = {
    "loss",
    "query/nll",
    "query/accuracy",
    "support/cross_entropy_0",
    "learning_rate/routing",
  }
  assert all(expected <= line.keys() for line in lines)
  assert all(line["support/cross_entropy_1"] < line["support/cross_entropy_0"] for line in lines)
  splits = json.loads((workdir / "results.json").read_text())["splits"]
  assert {split["split"] for split in splits} == {"valid", "test"}
  (outputs,) = compmod_jax.load(workdir).translate(["ba da"])
  assert isinstance(outputs, str)


def test_a_run_goes_on_to_the_same_bits(run, tmp_path):
  workdir, experiment = run
  again = tmp_path / "again"
  shutil.copytree(workdir, again)
  for path in (again / "checkpoints").glob("step_*"):
    if int(path.name[5:13]) > 2:
      shutil.rmtree(path)
  train(experiment, again, report=False)
  assert_same_bits(state_of(again), state_of(workdir))
  for kind in ("train", "eval"):
    assert computed(again, kind) == computed(workdir, kind)
