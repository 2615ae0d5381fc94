"""Tables of recurrent modules, plastic connections, few-shot and continual learning, and competing
experts."""

import dataclasses
from collections.abc import Mapping

from compmod_jax.core.errors import check_choice
from compmod_jax.tables.grid import Column
from compmod_jax.tables.spec import Row, Spec
from compmod_jax.training.experiment import load_config


def _rows(
  config: str, variants: Mapping[str, str], published: Mapping[str, Mapping[str, float]]
) -> dict[str, Row]:
  """Rows of variants of a configuration, name -> variant, which no clock stops."""
  rows = {}
  for name, variant in variants.items():
    experiment = load_config(f"{config}:{variant}" if variant else config)
    experiment = dataclasses.replace(experiment, time_limit_minutes=0.0)
    rows[name] = Row(experiment, published.get(name, {}))
  return rows


def copying(scale: str) -> Spec:
  """Recurrent modules and LSTMs on copying, after pauses of training's length and longer ones.

  Raises:
    UserError: an unknown scale.
  """
  scales = {
    "tiny": "4 symbols of 8 after 15 blanks, and after 60",
    "cpu": "10 symbols of 8 after 50 blanks, and after 200; 6,000 steps of 32 sequences",
    "paper": "10 symbols of 8 after 50 blanks, and after 200; 10,000 steps of 64 sequences",
  }
  check_choice("--scale", scale, scales)
  if scale == "tiny":
    variants = {"LSTM-192": "small-lstm-192", "LSTM-96": "small-lstm-96", "RIM": "small"}
    rows, short, long = _rows("rim_copying", variants, {}), "blanks_15", "blanks_60"
  else:
    figures = {"LSTM-300": 4.32, "LSTM-600": 3.56, "RIM": 0.0}
    variants = {"LSTM-300": "lstm-300", "LSTM-600": "lstm-600", "RIM": ""}
    if scale == "cpu":
      variants = {row: f"{variant}-cpu".lstrip("-") for row, variant in variants.items()}
    published = {row: {"loss, longer": figure} for row, figure in figures.items()}
    rows, short, long = _rows("rim_copying", variants, published), "blanks_50", "blanks_200"
  columns = (
    Column("loss", short, "loss", 4, lower=True),
    Column("loss, longer", long, "loss", 4, lower=True),
    Column("exact, longer", long, "exact_match", 1),
  )
  title = "Copying after a longer pause than in training (Kolios 2023, Table 4.1)"
  return Spec(title, scales[scale], rows, next(iter(rows)), columns)


def digits(scale: str) -> Spec:
  """Recurrent modules and LSTMs on digits pixel by pixel, in the size of training and larger.

  Raises:
    UserError: an unknown scale.
  """
  images = "images of 14 x 14, a tenth of MNIST, also in 16 x 16, 19 x 19 and 24 x 24"
  scales = {"cpu": f"{images}; 240 units, 40 epochs", "small": images}
  check_choice("--scale", scale, scales)
  published = {
    "LSTM-600": {"16 x 16": 84.5, "19 x 19": 52.2, "24 x 24": 21.9},
    "RIM": {"16 x 16": 90.0, "19 x 19": 73.4, "24 x 24": 38.1},
  }
  variants = {"LSTM-600": "lstm-600", "LSTM-300": "lstm-300", "RIM": ""}
  if scale == "cpu":
    published, variants = {}, {"LSTM-240": "lstm-240-cpu", "RIM": "cpu"}
  columns = tuple(
    Column(f"{size} x {size}", f"pixels_{size}", "exact_match", 1) for size in (14, 16, 19, 24)
  )
  title = "Digits in other sizes than in training (Kolios 2023, Table 4.1)"
  rows = _rows("rim_digits", variants, published)
  return Spec(title, scales[scale], rows, next(iter(rows)), columns)


def cues(scale: str) -> Spec:
  """Plastic connections and plain cells of as many parameters, asked for what they were shown.

  Raises:
    UserError: an unknown scale.
  """
  scales = {"tiny": "4 pairs of 10 cues and 8 answers, 2,000 steps of 64 sequences, on a CPU"}
  check_choice("--scale", scale, scales)
  variants = {
    "network": "network",
    "LSTM": "lstm",
    "hebbian": "hebbian",
    "simple": "",
    "retroactive": "retroactive",
    "plastic LSTM": "plastic-lstm",
  }
  columns = (
    Column("answers, 4 pairs", "pairs_4", "accuracy", 4),
    Column("answers, 6 pairs", "pairs_6", "accuracy", 4),
    Column("loss, 4 pairs", "pairs_4", "loss", 4, lower=True),
  )
  title = "Associations of cues and answers (Knowles 2022, section 2.3)"
  return Spec(title, scales[scale], _rows("cue_association", variants, {}), "network", columns)


def plastic_lm(scale: str) -> Spec:
  """Language models with plastic connections and a plain LSTM of as many parameters.

  Published, plastic LSTMs are about 1 point of perplexity better on the Penn Treebank.

  Raises:
    UserError: an unknown scale.
  """
  scales = {
    "tiny": "10,000 English sentences of the project's grammar, 64 units, 6 epochs, on a CPU",
    "ptb": "the Penn Treebank in Mikolov's split, 200 units, 8 epochs",
  }
  check_choice("--scale", scale, scales)
  rules = {"hebbian": "hebbian", "simple": "", "retroactive": "retroactive"}
  variants = {"LSTM": "lstm", **{f"plastic LSTM, {name}": rule for name, rule in rules.items()}}
  splits = ["test", "valid"]
  if scale == "ptb":
    variants = {name: f"ptb-{variant}".rstrip("-") for name, variant in variants.items()}
  else:
    splits += ["combination", "attractor", "depth", "length"]
  columns = tuple(Column(f"PPL {split}", split, "perplexity", lower=True) for split in splits)
  title = "Language models with plastic connections (Knowles 2022, section 2.3)"
  return Spec(title, scales[scale], _rows("plastic_lm", variants, {}), "LSTM", columns)


_QUERIES = "share of queries"


def few_shot(scale: str) -> Spec:
  """Methods of few-shot classification on generated characters, 600 episodes.

  Raises:
    UserError: an unknown scale.
  """
  scales = {"5way": "5 classes, 1 example of each", "20way": "20 classes, 1 example of each"}
  check_choice("--scale", scale, scales)
  columns = [
    Column("accuracy", "test", "accuracy", 4, unit=_QUERIES),
    Column("accuracy valid", "valid", "accuracy", 4, unit=_QUERIES),
  ]
  if scale == "20way":
    rows = _rows("few_shot_maml", {"MAML": "20way"}, {"MAML": {"accuracy": 0.958}})
  else:
    variants = {"MAML": "", "MAML, first order": "first_order", "Meta-SGD": "meta_sgd"}
    rows = _rows("few_shot_maml", variants | {"ANIL": "anil"}, {"MAML": {"accuracy": 0.987}})
    # One run is scored both ways: what it learned depends on no number of classes.
    columns.append(Column("accuracy, 20 classes", "test", "20_way/accuracy", 4, unit=_QUERIES))
    published = {"accuracy": 0.988, "accuracy, 20 classes": 0.960}
    variants = {"prototypes": "", "matching": "matching"}
    rows |= _rows("few_shot_prototypes", variants, {"prototypes": published})
  title = "Few-shot classification; published on Omniglot"
  return Spec(title, f"generated characters, {scales[scale]}", rows, "MAML", tuple(columns))


def leopard(scale: str) -> Spec:
  """Few-shot classification of sentences by properties that meta-training does not have.

  All rows of a seed start from the encoder that its first row trained.

  Raises:
    UserError: an unknown scale.
  """
  scales = {"tiny": "sentences of the grammar by hidden property, 2 classes, on a CPU"}
  check_choice("--scale", scale, scales)
  first = "fine-tuning"
  variants = {
    first: "fine_tune",
    "LEOPARD": "",
    "prototypes": "prototypes",
    "MAML": "maml",
    "black box": "black_box",
  }

  made = _rows("few_shot_sentences", variants, {})
  rows = {
    name: dataclasses.replace(row, starts_from=first if row.experiment.start else "")
    for name, row in made.items()
  }
  columns = (
    Column("accuracy, 4 examples", "test", "4_shot/accuracy", 4, unit=_QUERIES),
    Column("accuracy, 8 examples", "test", "accuracy", 4, unit=_QUERIES),
    Column("accuracy, 16 examples", "test", "16_shot/accuracy", 4, unit=_QUERIES),
    Column("accuracy valid", "valid", "accuracy", 4, unit=_QUERIES),
  )
  title = "Few-shot classification of sentences (Kolios 2023, section 4.8.8)"
  return Spec(title, scales[scale], rows, first, columns)


def experts(scale: str) -> Spec:
  """Ten experts for ten transformations, with and without a bias for those that win little.

  Published, without it, each transformation has an expert of its own in 7 of 10 runs.

  Raises:
    UserError: an unknown scale.
  """
  scales = {"tiny": "handwritten digits of 12 x 12 pixels, on a CPU"}
  check_choice("--scale", scale, scales)
  columns = (
    Column("all specialised", "test", "experts/all_specialised", 1, unit="share of runs"),
    Column("specialised", "test", "experts/specialised", 1, unit="transformations"),
    Column("idle", "test", "experts/idle", 1, lower=True, unit="experts"),
    Column("restored", "test", "experts/restored_loss", 4, lower=True, unit="mean squared error"),
    Column(
      "transformed", "test", "experts/transformed_loss", 4, lower=True, unit="mean squared error"
    ),
  )
  title = "Experts that compete for transformed digits (Kolios 2023, section 4.6.7)"
  published = {"experts": {"all specialised": 0.7}}
  rows = _rows("competing_experts", {"experts": "", "balanced": "balanced"}, published)
  return Spec(title, scales[scale], rows, "experts", columns)


def continual(scale: str) -> Spec:
  """Meta-learning and plain training before 600 classes are learned one after the other.

  Raises:
    UserError: an unknown scale.
  """
  scales = {"tiny": "generated characters, 15 examples of each class, once each, on a CPU"}
  check_choice("--scale", scale, scales)
  named = {
    "in order": "last_layer",
    "two layers": "prediction_layers",
    "mixed": "interleaved",
    "rehearsal": "rehearsal",
    "EWC": "ewc",
    "LwF": "lwf",
    "fine-tuned": "fine_tuned",
    "scratch": "scratch",
  }
  columns = (
    Column("in order, 200", "test", "last_layer/accuracy_200", 4),
    Column("mixed, 200", "test", "interleaved/accuracy_200", 4),
    *(Column(f"{name}, 600", "test", f"{of}/accuracy_600", 4) for name, of in named.items()),
    Column("in order, learned", "test", "last_layer/train_accuracy_600", 4),
    Column("retention", "test", "last_layer/retention", 4),
  )
  variants = {
    "pre-training": "pretrain",
    "OML": "oml",
    "ANML": "",
    "pre-training, gated": "pretrain_gated",
  }
  rows = _rows("continual_anml", variants, {})
  title = "Classes learned one after the other (Kolios 2023, section 4.8.11)"
  return Spec(title, scales[scale], rows, "pre-training", columns)
