"""The models of Hugging Face's that we compare with, as CTranslate2 runs them."""

import functools
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import ctranslate2
import numpy as np
from ctranslate2.converters.transformers import BartLoader, GPT2Loader

from compmod_jax.data.tokenizers import BOS, EOS, PAD, UNK

NEVER = (PAD, BOS, UNK)


def names(numbers: Sequence[int]) -> list[str]:
  """CTranslate2 knows tokens by their strings: `t` and the number."""
  return [f"t{number}" for number in numbers]


def translation(
  marian: Any, kind: str, threads: int, *, beams: int, most: int
) -> Callable[[Sequence[Sequence[int]]], list[list[int]]]:
  """A call that translates sources, each with its end token: the best tokens of each, in order.

  Args:
    marian: the model, as Hugging Face has it.
    kind: of numbers, `float32` or `int8`.
    threads: cores.
    beams: of the search.
    most: tokens of a translation.
  """
  # Its attention and norms are BART's; Marian's own start token there is not an embedding.
  marian.config.normalize_before = marian.config.normalize_embedding = False
  spec = BartLoader().get_model_spec(marian)
  spec.register_source_vocabulary(names(range(marian.config.vocab_size)))
  spec.register_target_vocabulary(names(range(marian.config.decoder_vocab_size)))
  spec.config.add_source_eos = False
  spec.config.decoder_start_token = names([BOS])[0]
  translator = _load(spec, kind, ctranslate2.Translator, threads)

  def run(sources: Sequence[Sequence[int]]) -> list[list[int]]:
    results = translator.translate_batch(
      [names(source) for source in sources],
      beam_size=beams,
      length_penalty=1.0,
      min_decoding_length=0,
      max_decoding_length=most,
      suppress_sequences=[names([token]) for token in NEVER],
      return_end_token=True,
      max_batch_size=32,
    )
    return [[int(token[1:]) for token in one.hypotheses[0]] for one in results]

  return run


def generation(gpt2: Any, kind: str, threads: int, *, end: int) -> Callable[..., np.ndarray]:
  """A call that goes on from prompts [rows, length] greedily: tokens [rows, new]."""
  spec = GPT2Loader().get_model_spec(gpt2)
  spec.register_vocabulary(names(range(gpt2.config.vocab_size)))
  generator = _load(spec, kind, ctranslate2.Generator, threads, end=end)

  def run(prompts: np.ndarray, new: int) -> np.ndarray:
    results = generator.generate_batch(
      [names(prompt) for prompt in prompts.tolist()],
      max_length=new,
      min_length=new,
      sampling_topk=1,
      include_prompt_in_result=False,
    )
    return np.asarray([one.sequences_ids[0] for one in results])

  return run


def _load(spec: Any, kind: str, load: Callable[..., Any], threads: int, end: int = EOS) -> Any:
  """The model, written to a folder and read from there."""
  spec.config.bos_token, spec.config.unk_token = names([BOS, UNK])
  spec.config.eos_token = names([end])[0]
  spec.validate()
  spec.optimize(quantization=None if kind == "float32" else kind)
  with tempfile.TemporaryDirectory() as folder:
    spec.save(folder)
    read = functools.partial(load, folder, device="cpu", compute_type=kind)
    return read(inter_threads=1, intra_threads=threads)
