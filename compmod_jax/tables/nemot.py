"""Tables of modulation: Knowles 2022, chapter 3. Scores are 0 to 100, higher is better."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from compmod_jax.core.errors import check, check_choice
from compmod_jax.data.qa.file_sets import QASet
from compmod_jax.data.qa.mixed import Mixed, name_of
from compmod_jax.data.qa.question import FORMATS
from compmod_jax.tables.grid import Column
from compmod_jax.tables.spec import Row, Spec, with_model
from compmod_jax.tasks.causal_lm import CausalLMConfig
from compmod_jax.tasks.question_answering import AnsweringConfig
from compmod_jax.training.experiment import Experiment, Phase, load_config

SCALES = {
  "tiny": "small simulated worlds told in English, on a CPU",
  "small": "the sets of $COMPMOD_DATA/qa together, an hour a run on a CPU",
  "paper": "the thesis's sets and size, on GPUs",
}
_VARIANTS = {"tiny": "worlds", "small": "general", "paper": "paper"}
_NEMOT, _OFF, _DECODER = "NeMoT", "gate off", "decoder"
_SHIFTED = ("facts", "names", "length")
_ALONE_COLUMNS = (Column("score test", "test", "score"), Column("score valid", "valid", "score"))
# Table 3.7 and 3.8: NeMoT and GPT-2 Medium, our names of the columns.
_PUBLISHED = {
  "arc test": (38.53, 37.88),
  "openbookqa test": (49.80, 45.60),
  "mctest test": (56.19, 57.50),
  "boolq valid": (74.95, 74.40),
  "race valid": (48.43, 52.57),
  "squad2 valid": (52.72, 54.05),
  "narrativeqa test": (27.91, 26.11),
  "piqa unseen": (31.72, 10.39),
  "siqa unseen": (28.25, 24.92),
  "winogrande unseen": (36.94, 17.36),
}


# Table 3.1: NeMoT with windows of its length, and GPT-2 Small as its own paper has it.
_ZERO_SHOT = {"PPL wikitext2": (36.91, 29.41), "PPL ptb": (36.24, 65.85)}
# Table 3.4: NeMoT and GPT-2 Medium, fine-tuned on one set.
_ALONE = {
  "race": {"score valid": (60.02, 67.22), "score test": (57.94, 64.19)},
  "squad2": {"score valid": (67.29, 69.85)},
  "boolq": {"score valid": (77.13, 78.72)},
  "narrativeqa": {"score test": (41.19, 24.08)},
}
# Table 3.9: NeMoT from the pre-trained model, and from the general one.
_TUNED = {
  "commonsenseqa": {"score valid": (33.74, 31.29)},
  "piqa": {"score valid": (59.63, 55.50)},
  "mctest": {"score valid": (43.75, 51.25), "score test": (44.05, 56.07)},
  "winogrande": {"score valid": (59.98, 57.22)},
}
GENERAL = "runs/nemot_general"
_PRETRAINING = {
  "tiny": ("grammar", "English sentences of the project's grammar, on a CPU"),
  "small": (
    "small",
    "public domain text and a part of C4, half an hour a run on a CPU",
  ),
  "paper": ("paper", "C4 at the thesis's size, on many GPUs"),
}


def zero_shot(scale: str) -> Spec:
  """Table 3.1: perplexity of text that no model was trained on.

  Raises:
    UserError: an unknown scale.
  """
  check_choice("--scale", scale, _PRETRAINING)
  variant, data = _PRETRAINING[scale]
  name = f"nemot_pretrain:{variant}"
  base, decoder = (
    # A run that its clock stops is another run on another machine.
    dataclasses.replace(load_config(f"{name}{suffix}"), time_limit_minutes=0.0)
    for suffix in ("", "-decoder")
  )
  assert isinstance(base.task, CausalLMConfig)
  splits = base.task.data.splits()
  columns = tuple(
    Column(f"PPL {split}", split, "perplexity", lower=True) for split in splits if split != "train"
  )
  published = [{c: pair[i] for c, pair in _ZERO_SHOT.items()} for i in range(2)]
  rows = {
    _DECODER: Row(decoder, published[1]),
    _OFF: Row(with_model(base, gate="off")),
    _NEMOT: Row(base, published[0]),
  }
  title = (
    "Zero-shot perplexity per token (Knowles 2022, Table 3.1; published with other tokens, GPT-2's"
    " as its own paper has it)"
  )
  return Spec(title, data, rows, _DECODER, columns)


def alone(scale: str) -> Spec:
  """Table 3.4: models for one set each.

  Raises:
    UserError: an unknown scale, or one whose data are not of several sets.
  """
  models = {_DECODER: _experiment(scale, "-decoder"), _NEMOT: _experiment(scale)}
  rows, references = {}, {}
  for data in _sets(scale, models[_NEMOT], ("race_middle", "boolq", "fairytaleqa", *_ALONE)):
    for number, (model, base) in enumerate(reversed(models.items())):
      figures = {c: pair[number] for c, pair in _ALONE.get(data.name, {}).items()}
      rows[f"{data.name}, {model}"] = Row(_on(base, data), figures)
    references[f"{data.name}, {_NEMOT}"] = f"{data.name}, {_DECODER}"
  title = "One set alone (Knowles 2022, Table 3.4: fine-tuned)"
  return Spec(title, SCALES[scale], rows, references, _ALONE_COLUMNS)


def tuned(scale: str) -> Spec:
  """Table 3.9: fine-tuned on one set, from where the general model starts or from that model.

  The general model has to be there, in the workdir `GENERAL`.

  Raises:
    UserError: an unknown scale, or one whose data are not of several sets.
  """
  base, rows, references = _experiment(scale), {}, {}
  plain = "pre-trained" if base.start else "scratch"
  starts = {plain: base.start, "general": GENERAL}
  for data in _sets(scale, base, ("mctest", "siqa", *_TUNED)):
    figures = _TUNED.get(data.name, {})
    for number, (start, folder) in enumerate(starts.items()):
      experiment = dataclasses.replace(_on(base, data), start=folder)
      rows[f"{data.name}, from {start}"] = Row(
        experiment, {c: pair[number] for c, pair in figures.items()}
      )
    references[f"{data.name}, from general"] = f"{data.name}, from {plain}"
  title = (
    "Fine-tuned on one set, from the general model or not (Knowles 2022, Table 3.9); that one is"
    f" `python -m train.main --config configs/nemot_qa.py:{_VARIANTS[scale]} --workdir {GENERAL}`"
  )
  return Spec(title, SCALES[scale], rows, references, _ALONE_COLUMNS)


def general(scale: str) -> Spec:
  """Tables 3.7 and 3.8: one model for all sets, in and out of the domain, against baselines.

  Raises:
    UserError: an unknown scale.
  """
  base = _experiment(scale)
  decoder = _experiment(scale, "-decoder")
  columns = _columns(base)
  published = [{c: pair[i] for c, pair in _PUBLISHED.items()} for i in range(2)]
  rows = {
    _DECODER: Row(decoder, published[1]),
    _OFF: Row(with_model(base, gate="off")),
    _NEMOT: Row(base, published[0]),
  }
  title = "General question answering (Knowles 2022, Tables 3.7 and 3.8)"
  return Spec(title, SCALES[scale], rows, _DECODER, columns)


def strategies(scale: str) -> Spec:
  """Table 3.10: reading strategies, one by one and together, at both positions.

  Raises:
    UserError: an unknown scale.
  """
  base = _experiment(scale)
  # Options of one question see each other, so that every row holds one.
  base = dataclasses.replace(base, task=dataclasses.replace(base.task, turns=1))
  both = {"option_interaction": True, "highlighting": "vanilla"}
  rows: Mapping[str, Mapping[str, Any]] = {
    "none": {},
    "AOI": {"option_interaction": True},
    "highlighting": {"highlighting": "vanilla"},
    "highlighting, embedding": {"highlighting": "embedding"},
    "AOI and highlighting": both,
  }
  made = {name: Row(with_model(base, **changes)) for name, changes in rows.items()}
  title = "Reading strategies, from scratch (Knowles 2022, Table 3.10: fine-tuned)"
  return Spec(title, SCALES[scale], made, "none", _columns(base))


def scan(scale: str) -> Spec:
  """SCAN as questions: NeMoT, the same without its gate, and a decoder of as many parameters.

  The protocol is that of `tables.generalisation`: a fixed number of steps, the moving average of
  the last parameters, whole outputs by greedy search.

  Raises:
    UserError: an unknown scale.
  """
  scales = {
    "length": "up to 22 actions in training",
    "jump": "jump by itself in training",
    "around_right": "no around right in training",
  }
  check_choice("--scale", scale, scales)
  splits = {"jump": "addprim_jump", "around_right": "template_around_right"}
  split = splits.get(scale, scale)
  nemot, decoder = (
    dataclasses.replace(
      load_config(f"nemot_scan:{variant}"),
      model_selection="last",
      time_limit_minutes=0.0,
      phases=(Phase(steps=10_000),),
      evaluate_every=2000,
    )
    for variant in (split, f"{split}-decoder")
  )
  rows = {
    _NEMOT: Row(nemot),
    _OFF: Row(with_model(nemot, gate="off")),
    _DECODER: Row(decoder),
    f"{_NEMOT}, relative": Row(with_model(nemot, positions="relative")),
    f"{_DECODER}, relative": Row(with_model(decoder, positions="relative")),
  }
  columns = tuple(
    Column(f"exact {part}", part, "extractive_exact_match", 1) for part in ("valid", "test")
  )
  title = "SCAN as questions, exact match"
  return Spec(title, f"SCAN, {scales[scale]}", rows, _DECODER, columns)


def _sets(scale: str, base: Experiment, names: Sequence[str]) -> list[QASet]:
  """The sets of these names that can be had at the scale and trained on."""
  assert isinstance(base.task, AnsweringConfig)
  data = base.task.data
  found = {name_of(one): one for one in (*data.seeds, *data.unseen)}
  sets = [one for name in names if isinstance(one := found.get(name), QASet) and one.train]
  check(
    bool(sets),
    f"--scale {scale} has none of the sets of this table ({', '.join(dict.fromkeys(names))}); use"
    " --scale small.",
  )
  return sets


def _on(base: Experiment, data: QASet) -> Experiment:
  """The experiment on one set."""
  task = dataclasses.replace(base.task, data=Mixed(seeds=(data,)))
  return dataclasses.replace(base, name=f"{base.name}, {data.name} alone", task=task)


def _experiment(scale: str, suffix: str = "") -> Experiment:
  check_choice("--scale", scale, SCALES)
  base = load_config(f"nemot_qa:{_VARIANTS[scale]}{suffix}")
  # A run that its clock stops is another run on another machine.
  return dataclasses.replace(base, time_limit_minutes=0.0)


def _columns(experiment: Experiment) -> tuple[Column, ...]:
  """What is compared: of worlds every format and number of facts, else every set."""
  task = experiment.task
  assert isinstance(task, AnsweringConfig)
  if len(task.data.seeds) == 1:
    cells = itertools.product(FORMATS, (1, 2, 3))
    found = [
      Column(f"{format.replace('_', ' ')} {facts}", "test", f"exact_match/{format}/{facts}")
      for format, facts in cells
    ]
    shifted = [Column(f"score {split}", split, "score") for split in _SHIFTED]
    return (Column("score test", "test", "score"), *found, *shifted)
  splits = {"valid": task.data.seeds, "test": task.data.seeds, "unseen": task.data.unseen}
  return tuple(
    Column(f"{name_of(data)} {split}", split, f"{name_of(data)}/score")
    for split, sets in splits.items()
    for data in sets
    if split == "unseen" or split in data.splits()
  )
