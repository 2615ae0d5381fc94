"""BERT of `transformers` with both heads, imported and exported, gives the same numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from compmod_jax.checkpoints import huggingface as layout
from compmod_jax.checkpoints.huggingface import Checkpoint, read_checkpoint, write_checkpoint
from compmod_jax.checkpoints.huggingface_folder import read_entries
from compmod_jax.core.errors import UserError
from compmod_jax.core.intermediates import run
from compmod_jax.core.losses import cross_entropy
from compmod_jax.models.encoder import Encoder

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.peers

VOCAB = 40
SHAPES = {
  "one layer": {"hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 3},
  "two layers": {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2},
  "three segments, the other gelu": {
    "hidden_size": 20,
    "num_hidden_layers": 1,
    "num_attention_heads": 5,
    "type_vocab_size": 3,
    "hidden_act": "gelu_new",
  },
}


@pytest.fixture(scope="module", params=SHAPES)
def theirs(request, tmp_path_factory):
  """A model of theirs with random weights, biases and norms too, and its folder."""
  torch.manual_seed(0)
  sizes = {"vocab_size": VOCAB, "intermediate_size": 24, "max_position_embeddings": 16}
  config = transformers.BertConfig(**sizes, **SHAPES[request.param])
  model = transformers.BertForPreTraining(config).eval()
  with torch.no_grad():
    for value in model.parameters():
      value.add_(0.3 * torch.randn_like(value))
  folder = tmp_path_factory.mktemp("theirs")
  model.save_pretrained(folder, safe_serialization=True)
  return model, folder


def batch(time: int = 13) -> tuple[np.ndarray, np.ndarray]:
  """Tokens of three texts, two of them padded at the end, and their segments."""
  random = np.random.default_rng(time)
  tokens = random.integers(5, VOCAB, (3, time))
  tokens[1, time - 3 :] = tokens[2, 4:] = 0
  return tokens, (np.arange(time) >= np.asarray([[3], [time // 2], [2]])).astype(int)


def their_output(model, tokens, segments, **labels):
  given = {"input_ids": tokens, "token_type_ids": segments, "attention_mask": (tokens != 0) * 1}
  return model(**{name: torch.tensor(value) for name, value in (given | labels).items()})


def our_outputs(found: Checkpoint, params, tokens, segments) -> tuple[jax.Array, jax.Array]:
  module = Encoder(found.config, found.vocab, found.pad)
  logits, captured = run(
    module.apply,
    {"params": jax.tree.map(jnp.asarray, params)},
    jnp.asarray(tokens),
    segments=jnp.asarray(segments),
    capture=("next_sentence",),
  )
  return logits, captured["next_sentence"][:, 0]


def test_both_heads_of_an_imported_model_give_the_same_logits(theirs):
  model, folder = theirs
  found = read_checkpoint(folder)
  assert found.config.segments == model.config.type_vocab_size
  for time in (5, 13):
    tokens, segments = batch(time)
    with torch.no_grad():
      expected = their_output(model, tokens, segments)
    logits, following = our_outputs(found, found.params, tokens, segments)
    real = tokens != 0
    np.testing.assert_allclose(
      np.asarray(logits)[real], expected.prediction_logits.numpy()[real], atol=1e-4
    )
    np.testing.assert_allclose(following, expected.seq_relationship_logits.numpy(), atol=1e-4)
    assert np.abs(np.diff(following, axis=0)).max() > 1e-2


def test_the_sum_of_both_losses_has_the_same_gradients(theirs):
  model, folder = theirs
  found, (tokens, segments) = read_checkpoint(folder), batch()
  labels = np.where((tokens != 0) & (np.arange(13) % 3 == 1), tokens[:, ::-1], -100)
  follows = np.asarray([0, 1, 1])
  model.zero_grad()
  output = their_output(model, tokens, segments, labels=labels, next_sentence_label=follows)
  output.loss.backward()

  def loss(params):
    logits, following = our_outputs(found, params, tokens, segments)
    words = cross_entropy(logits, jnp.asarray(np.maximum(labels, 0)), jnp.asarray(labels >= 0))
    pairs = cross_entropy(following[:, None], jnp.asarray(follows[:, None]), jnp.ones((3, 1), bool))
    return words.nll / words.count + pairs.nll / pairs.count

  value, grads = jax.jit(jax.value_and_grad(loss))(found.params)
  np.testing.assert_allclose(value, output.loss.item(), rtol=1e-5)
  slopes = {name: p.grad.numpy() for name, p in model.named_parameters()}
  entries = list(layout._entries(found.config, "bert", found.pad))
  expected = read_entries(folder, slopes, entries, what="BERT", ignored=lambda name: True)
  ours = flatten_dict(grads, sep="/")
  assert ours.keys() == expected.keys()
  for path, slope in expected.items():
    np.testing.assert_allclose(ours[path], slope, atol=2e-5, rtol=2e-3, err_msg=path)
  assert np.abs(expected["segment_table"]).max() > 1e-3
  assert np.abs(expected["next_head/kernel"]).max() > 1e-3


def test_their_library_opens_an_exported_folder_and_gives_the_same_logits(theirs, tmp_path):
  _, folder = theirs
  found = read_checkpoint(folder)
  write_checkpoint(tmp_path / "out", found)
  again, info = transformers.BertForPreTraining.from_pretrained(
    tmp_path / "out", output_loading_info=True
  )
  assert not info["missing_keys"]
  tokens, segments = batch()
  with torch.no_grad():
    expected = their_output(again.eval(), tokens, segments)
  logits, following = our_outputs(found, found.params, tokens, segments)
  real = tokens != 0
  np.testing.assert_allclose(
    np.asarray(logits)[real], expected.prediction_logits.numpy()[real], atol=1e-4
  )
  np.testing.assert_allclose(following, expected.seq_relationship_logits.numpy(), atol=1e-4)
  with pytest.raises(UserError, match="Export it as bert"):
    write_checkpoint(tmp_path / "roberta", found._replace(kind="roberta"))
