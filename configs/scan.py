"""SCAN commands to actions (Lake & Baroni 2018): does a model compose what it has learned?

Run:      python -m train.main --config configs/scan.py:simple
Variants: simple, length, addprim_jump, addprim_turn_left, template_right,
          template_opposite_right, template_around_right, template_jump_around_right
                     the published splits
          length_24, length_25, length_26, length_27, length_28, length_30, length_32, length_33,
          length_36, length_40
                     training has all commands of up to so many actions
          mcd1, mcd2, mcd3
                     made by the published measure of compound divergence
          addprim_jump_added, addprim_turn_left_added, template_around_right_added
                     20 copies of each primitive of the kind that is held out, in training
          mcd1_labels, mcd2_labels, mcd3_labels, length_labels, addprim_jump_labels,
          template_around_right_labels
                     labels of how far functions have come are predicted beside the actions
          mcd1_scratchpad, mcd2_scratchpad, mcd3_scratchpad, length_scratchpad,
          length_26_scratchpad, addprim_jump_added_scratchpad,
          template_around_right_added_scratchpad
                     what is left of functions is said by words before each action, so that the
                     decoder reads it; outputs are right if these words are right, too
Files:    the published ones in place of generated commands: add --config.task.data.folder=PATH
Measured: exact match simple 99.7 %, addprim_jump 0.6 %, length 0.0 % (seed 0; 22, 22 and 31 minutes
          on one core of a shared AMD EPYC machine, 2026-11-21)
"""

from typing import Any, get_args

from compmod_jax.core import errors
from compmod_jax.data.buckets import BatchConfig
from compmod_jax.data.synthetic.scan import CUTS, PROGRESS, ScanData, SplitName
from compmod_jax.data.tokenizers import TokenizerConfig
from compmod_jax.decoding import DecodeConfig
from compmod_jax.models.transformer import TransformerConfig
from compmod_jax.tasks.translation import TranslationConfig
from compmod_jax.training.experiment import Experiment, Phase
from compmod_jax.training.optimizer import OptimizerConfig

# Variant -> fields of the data; commands of a split are made where it is chosen.
_DATA: dict[str, dict[str, Any]] = {
  **{split: {"split": split} for split in get_args(SplitName)},
  **{f"length_{cut}": {"split": "length", "cut": cut} for cut in CUTS[1:]},
  **{
    f"{split}_added": {"split": split, "added_primitives": 20}
    for split in ("addprim_jump", "addprim_turn_left", "template_around_right")
  },
}
_LABELS, _SCRATCHPAD = "_labels", "_scratchpad"
_LABELLED = ("mcd1", "mcd2", "mcd3", "length", "addprim_jump", "template_around_right")
_WRITTEN = (
  *("mcd1", "mcd2", "mcd3", "length", "length_26"),
  *("addprim_jump_added", "template_around_right_added"),
)


def get_config(variant: str) -> Experiment:
  variant = variant or "simple"
  more = [split + _LABELS for split in _LABELLED] + [split + _SCRATCHPAD for split in _WRITTEN]
  errors.check_choice("variant", variant, (*_DATA, *more))
  labelled, written = variant.endswith(_LABELS), variant.endswith(_SCRATCHPAD)
  split = variant.removesuffix(_LABELS).removesuffix(_SCRATCHPAD)
  words = 4 if written else 1  # of an action
  return Experiment(
    name=f"SCAN, {variant} split",
    task=TranslationConfig(
      data=ScanData(**_DATA[split], scratchpad=written),
      tokenizer=TokenizerConfig(kind="words"),
      target_tokenizer=TokenizerConfig(kind="words"),
      batch=BatchConfig(
        tokens=4096, ceiling=200 if written else 64, bucket_count=4, own_lengths=True
      ),
      label_smoothing=0.0,
      label_weight=1.0 if labelled else 0.0,
      # An action sequence is up to eight times as long as its command.
      decode=DecodeConfig(method="greedy", max_ratio=8 * words, max_extra=4 * words),
    ),
    model=TransformerConfig(
      encoder_layers=2,
      decoder_layers=2,
      dim=128,
      heads=4,
      ffn_dim=256,
      norm="pre",
      dropout=0.1,
      compete=("encoder_self",),
      target_labels=tuple(PROGRESS.values()) if labelled else (),
    ),
    optimizer=OptimizerConfig(
      learning_rate=2e-3, schedule="cosine", warmup_steps=200, b2=0.98, clip=1.0
    ),
    phases=(Phase(steps=3000),),
    evaluate_every=1000,
    evaluate_sentences=500,
    ema=0.99,
  )
