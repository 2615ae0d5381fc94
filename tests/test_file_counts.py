"""Each of some additions to the project is known by name to four source files at most.

`ADDITIONS` has a line for each: what it is, and every name by which a file can know it. Tests and
documentation do not count.
"""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("compmod_jax", "train", "configs", "benchmarks", "website")
MOST = 4
ADDITIONS: dict[str, tuple[str, ...]] = {
  "a sequence-to-sequence LSTM": (
    "seq2seq_lstm", "Seq2SeqLstm", "memory_attention", "AdditiveAttention", "additive attention",
    "nmt_lstm",
  ),
  "rotary positions and those of Transformer-XL": (
    "rotary", "rotate(", '"relative"', "RelativePositions", "relative positions", "Transformer-XL",
  ),
  "an objective of MAML": ("mlm_maml", "MetaConfig", "AdaptationScores"),
  "episodes of study pairs": ("MlcData", "synthetic.mlc", "synthetic/mlc", "study pairs"),
  "labels of target words": ("target_labels", "TargetLabels"),
  "generated characters": ("glyphs", "GlyphData"),
  "a convolutional network": ("conv_net", "ConvNet"),
  "a bias of distances": ("RelativeBias", "distance_buckets", "position_bias"),
  "spans that are cut out of texts": (
    "corrupt_spans", "restore_spans", "SpansConfig", "SpanCorruption", "text_to_text",
  ),
  "the next sentence beside masked tokens": (
    "next_sentence", "PairedBlocks", "NextSentence", "segment_table", "next_head",
  ),
  "a gate on every head": ("head_gate", "HeadGate", "gate_heads", "gated_heads"),
  "a recurrent model around any cell": (
    "models.recurrent", "RecurrentConfig", "LstmCellConfig", "GruCellConfig",
  ),
  "functions between which positions are routed": (
    "layers.interpreter", "neural_interpreter", "InterpreterConfig", "ScriptConfig",
  ),
  "a task on fuzzy expressions": ("fuzzy_logic", "FuzzyLogicConfig", "FuzzyExpressions"),
  "a decoder on vectors": ("Regressor",),
  "a task on fuzzy logic in context": (
    "tasks.logic_in_context", "tasks/logic_in_context", "LogicInContextConfig", "ContextModel",
  ),
  "experts that compete for examples": (
    "mechanisms.competing_experts", "mechanisms/competing_experts",
  ),
  "networks of experts for images": ("models.competing_experts", "models/competing_experts"),
  "transformed digits": ("transformed_digits", "TransformedDigits"),
  "a task on experts for images": (
    "tasks.image_experts", "ImageExpertsConfig", "ImageExpertsModel", "CompetitionLoss",
  ),
  "fast weights in decoders": ("fast_weights", "FastWeights"),
  "modulated nonlinearities": ("modulated_activation", "ModulatedActivation", "signal_dim"),
  "text saliency": ("saliency", "SaliencyNetwork", "key_bias"),
  "a report on plastic connections": ("analysis/plasticity", "plasticity.Plasticity"),
  "plastic language models": ("plastic_lm",),
  "learning at two levels": ("bilevel",),
  "batches of two parts": ("data.paired", "data/paired", "PairedDataset"),
  "a curriculum of lengths": ("short_first", "short_batches"),
  "classes of texts": (
    "text_classes", "SentenceData", "QuestionsBySet", "TextLines", "grammar.properties",
  ),
  "few-shot classification of texts": (
    "few_shot_text", "FewShotTextConfig", "few_shot_sentences", "FineTunedScores",
  ),
  "meta-learning of trajectories, and what keeps from forgetting": (
    "mechanisms import continual", "mechanisms/continual",
  ),
  "networks with gates, and as large ones without": (
    "models.neuromodulated", "models/neuromodulated", "NeuromodulatedConfig", "NeuromodulatedNet",
  ),
  "protocols of learning classes": (
    "tasks.protocols", "tasks/protocols", "UseConfig", "ContinualModel",
  ),
  "a task on classes one after the other": (
    "tasks.continual", "tasks/continual", "ContinualConfig",
  ),
  "a task on sequences": ("tasks.sequence", "SequenceConfig", "SequenceTask", "SequenceScores"),
  "penalties on distances": ("alibi",),
  "attention that is no softmax over keys": (
    "attention_forms", "attention_form", "GeometricAttention", "HypernetworkAttention",
    "DifferentialAttention",
  ),
  "a gate around whole layers": ("copy_gate", "CopyGate"),
  "experts inside heads": ("switch_head", "SwitchHead"),
  "layers that tokens may pass by": (
    "mixture_of_depths", "depth_layers", "depth_router", "DepthRouter",
  ),
  "how large fresh embeddings are": ("embedding_scale", "EmbeddingScale"),
}  # fmt: skip
# Files that set additions beside each other, each by its name.
COMPARISONS = {
  "benchmarks/ingredients.py", "compmod_jax/analysis/codes.py",
  "compmod_jax/tables/generalisation.py",
}  # fmt: skip
# Files of later additions, which use the earlier one.
LATER = {
  "a gate on every head": {
    "compmod_jax/analysis/roles/importance.py", "compmod_jax/checkpoints/t5.py",
  },
  "a convolutional network": {"compmod_jax/models/neuromodulated.py"},
  "a recurrent model around any cell": {"configs/cue_association.py", "configs/plastic_lm.py"},
  "functions between which positions are routed": {
    "compmod_jax/analysis/interpreter.py", "compmod_jax/tables/interpreter.py",
    "compmod_jax/tables/registry.py", "compmod_jax/commands/reproduce.py",
  },
  "a task on fuzzy expressions": {
    "compmod_jax/analysis/interpreter.py", "compmod_jax/tables/interpreter.py",
  },
  "a task on sequences": {"configs/cue_association.py"},
  "a sequence-to-sequence LSTM": {"compmod_jax/tables/translation.py"},
  "a bias of distances": {
    "compmod_jax/models/encoder.py", "compmod_jax/models/decoder_lm.py",
    "compmod_jax/layers/stack.py", "benchmarks/attention.py",
  },
  "rotary positions and those of Transformer-XL": {
    "configs/plastic_lm.py", "compmod_jax/layers/systematic.py", "compmod_jax/tables/nemot.py",
    "configs/logic_in_context.py", "configs/nmt_decoder.py", "benchmarks/attention.py",
    "compmod_jax/kernels/attention/rotation.py",
  },
  "spans that are cut out of texts": {"compmod_jax/data/qa/pairs.py"},
  "attention that is no softmax over keys": {"configs/logic_in_context.py"},
  "fast weights in decoders": {"compmod_jax/analysis/plasticity.py", "configs/plastic_lm.py"},
  "plastic language models": {"compmod_jax/analysis/plasticity.py"},
  "learning at two levels": {
    "compmod_jax/tasks/causal_lm.py", "configs/nemot_pretrain.py",
    "compmod_jax/tables/translation.py",
  },
}  # fmt: skip
# Files of the addition's own.
OWN = {
  "a sequence-to-sequence LSTM": (
    "compmod_jax/layers/memory_attention.py",
    "compmod_jax/models/seq2seq_lstm.py",
    "configs/nmt_lstm.py",
  ),
  "generated characters": ("compmod_jax/data/synthetic/glyphs.py",),
  "transformed digits": ("compmod_jax/data/transformed_digits.py",),
  "a convolutional network": ("compmod_jax/models/conv_net.py",),
  "a gate on every head": ("compmod_jax/mechanisms/head_gate.py",),
  "attention that is no softmax over keys": ("compmod_jax/layers/attention_forms.py",),
  "a gate around whole layers": ("compmod_jax/layers/copy_gate.py",),
  "experts inside heads": ("compmod_jax/layers/switch_head.py",),
  "layers that tokens may pass by": ("compmod_jax/layers/mixture_of_depths.py",),
  "fast weights in decoders": ("compmod_jax/layers/fast_weights.py",),
  "modulated nonlinearities": ("compmod_jax/mechanisms/modulated_activation.py",),
  "text saliency": ("compmod_jax/mechanisms/saliency.py",),
  "spans that are cut out of texts": ("compmod_jax/data/sources/text_to_text.py",),
}


def sources() -> dict[str, str]:
  """Path -> text of every source file, its own path included; lower case."""
  files = [*ROOT.glob("*.py"), ROOT / "pyproject.toml"]
  for folder in FOLDERS:
    files += (ROOT / folder).rglob("*.*")
  texts = {}
  for file in files:
    if file.suffix in (".py", ".toml", ".html", ".json", ".yml"):
      path = str(file.relative_to(ROOT))
      texts[path] = f"{path}\n{file.read_text()}".lower()
  return texts


def files_that_know(names: tuple[str, ...]) -> dict[str, list[str]]:
  """Name -> the source files that have it, whatever the case of its letters."""
  texts = sources()
  return {name: [path for path in texts if name.lower() in texts[path]] for name in names}


@pytest.mark.parametrize("addition", ADDITIONS)
def test_an_addition_is_known_to_four_files_at_most(addition):
  found = files_that_know(ADDITIONS[addition])
  assert [name for name, files in found.items() if not files] == []  # a name that went out of use
  assert len(set().union(*found.values()) - LATER.get(addition, set()) - COMPARISONS) <= MOST, found


@pytest.mark.parametrize("addition", OWN)
def test_the_names_of_an_addition_s_own_files_are_counted(addition):
  """Whoever uses one imports it by its name."""
  for path in OWN[addition]:
    assert (ROOT / path).is_file()
    assert Path(path).stem in ADDITIONS[addition]


def test_what_many_files_know_is_more_than_four():
  """The count can fail: of the Transformer; and a name that went out of use is found."""
  assert len(files_that_know(("TransformerConfig",))["TransformerConfig"]) > MOST
  assert files_that_know(("NameThatNoFileHas",)) == {"NameThatNoFileHas": []}
