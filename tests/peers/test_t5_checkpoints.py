"""T5 of `transformers`, imported and exported, gives the same logits and gradients."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax.traverse_util import flatten_dict

from compmod_jax.checkpoints import t5 as layout
from compmod_jax.checkpoints.huggingface_folder import read_entries
from compmod_jax.checkpoints.t5 import T5, read_t5, write_t5
from compmod_jax.core.errors import UserError
from compmod_jax.core.losses import cross_entropy
from compmod_jax.models.t5 import t5, t5_v1_1
from compmod_jax.models.transformer import Transformer

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.peers

VOCAB = 40
SHAPES = {
  "wide heads": {"d_model": 16, "d_kv": 8, "num_heads": 4, "num_layers": 1},
  "as many layers of heads that fill the width": {"d_model": 24, "d_kv": 4, "num_heads": 6},
  "few buckets, a deeper decoder": {
    "d_model": 20,
    "d_kv": 6,
    "num_heads": 2,
    "num_layers": 1,
    "num_decoder_layers": 3,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 12,
  },
}
VERSIONS = {
  "first": {"feed_forward_proj": "relu", "tie_word_embeddings": True},
  "1.1": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
}
CASES = [(version, shape) for version in VERSIONS for shape in SHAPES]


def make(version: str, shape: str):
  torch.manual_seed(0)
  sizes = {"num_layers": 2, "d_ff": 28, "vocab_size": VOCAB, **SHAPES[shape]}
  config = transformers.T5Config(**VERSIONS[version], **sizes, decoder_start_token_id=0)
  model = transformers.T5ForConditionalGeneration(config).eval()
  if version == "1.1":  # their library ties a fresh model's output, a published one's is its own
    model.lm_head.weight = torch.nn.Parameter(torch.zeros(VOCAB, config.d_model))
  with torch.no_grad():
    for name, value in model.named_parameters():
      value.copy_(torch.randn_like(value) * (1.0 if "shared" in name else 0.3))
      if "layer_norm" in name:
        value.add_(1.0)
  return model


@pytest.fixture(scope="module", params=CASES, ids=lambda case: ", ".join(case))
def theirs(request, tmp_path_factory):
  """A model of theirs with random weights, norms too; its folder; its version."""
  model = make(*request.param)
  folder = tmp_path_factory.mktemp("theirs")
  model.save_pretrained(folder, safe_serialization=True)
  if request.param[0] == "1.1":  # as the published ones say it, which older versions have written
    path = folder / "config.json"
    given = json.loads(path.read_text())
    given.pop("scale_decoder_outputs", None)
    path.write_text(json.dumps({**given, "tie_word_embeddings": False}))
  return model, folder, request.param[0]


def pairs(seed: int = 0, time: int = 17):
  """Three sources, two of them padded, and targets with the decoder's input before them."""
  random = np.random.default_rng(seed)
  source, target = random.integers(2, VOCAB, (3, time)), random.integers(2, VOCAB, (3, 11))
  source[1, time - 4 :] = source[2, 5:] = target[1, 7:] = 0
  return source, np.pad(target, ((0, 0), (1, 0)))[:, :-1], target


def their_output(model, source, given, target=None):
  labels = None if target is None else torch.tensor(np.where(target == 0, -100, target))
  return model(
    input_ids=torch.tensor(source),
    attention_mask=torch.tensor((source != 0).astype(int)),
    decoder_input_ids=torch.tensor(given),
    labels=labels,
  )


def module_of(found: T5) -> Transformer:
  return found.config.seq2seq(found.vocab, found.vocab, found.pad)


def our_logits(found: T5, source, given) -> np.ndarray:
  return np.asarray(jax.jit(module_of(found).apply)({"params": found.params}, source, given))


def test_an_imported_model_gives_the_same_logits(theirs):
  model, folder, version = theirs
  found = read_t5(folder)
  assert found.config.share_embeddings == {"first": "all", "1.1": "inputs"}[version]
  for time in (1, 40):
    source, given, _ = pairs(time, max(time, 6))
    with torch.no_grad():
      expected = their_output(model, source, given).logits.numpy()
    assert np.abs(expected).max() > 0.5
    np.testing.assert_allclose(our_logits(found, source, given), expected, atol=2e-4)


def test_the_loss_of_an_imported_model_has_the_same_gradients(theirs):
  model, folder, version = theirs
  found, (source, given, target) = read_t5(folder), pairs()
  model.zero_grad()
  output = their_output(model, source, given, target)
  output.loss.backward()

  def loss(params):
    logits = module_of(found).apply({"params": params}, jnp.asarray(source), jnp.asarray(given))
    losses = cross_entropy(logits, jnp.asarray(target), jnp.asarray(target) != 0)
    return losses.nll / losses.count

  value, grads = jax.jit(jax.value_and_grad(loss))(found.params)
  np.testing.assert_allclose(value, output.loss.item(), rtol=1e-5)
  slopes = {name: p.grad.numpy() for name, p in model.named_parameters()}
  slopes.setdefault("lm_head.weight", slopes["shared.weight"])
  entries = list(layout._entries(found.config, scaled=version == "first"))
  expected = read_entries(folder, slopes, entries, what="T5", ignored=lambda name: True)
  # Where our table is theirs divided by sqrt(dim), its gradient is theirs times that.
  expected["decoder_embedding/table"] *= found.config.dim
  ours = flatten_dict(grads, sep="/")
  assert ours.keys() == expected.keys()
  for path, slope in expected.items():
    assert np.abs(slope).max() > 1e-5, path
    np.testing.assert_allclose(
      ours[path], slope, atol=2e-5 * max(1, np.abs(slope).max()), rtol=1e-3, err_msg=path
    )


def test_their_library_opens_an_exported_folder_and_gives_the_same_logits(theirs, tmp_path):
  _, folder, _ = theirs
  found = read_t5(folder)
  write_t5(tmp_path / "out", found)
  again = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path / "out").eval()
  source, given, _ = pairs(3)
  with torch.no_grad():
    expected = their_output(again, source, given).logits.numpy()
  np.testing.assert_allclose(our_logits(found, source, given), expected, atol=2e-4)
  once_more = read_t5(tmp_path / "out")
  assert once_more.config == found.config
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), once_more.params, found.params
  )


def test_the_presets_have_the_sizes_of_their_small_models():
  sizes = {
    "first": (t5(), {}),
    "1.1": (
      t5_v1_1(),
      {"num_layers": 8, "num_heads": 6, "d_ff": 1024, "feed_forward_proj": "gated-gelu"},
    ),
  }
  for version, (config, fields) in sizes.items():
    with torch.device("meta"):
      model = transformers.T5ForConditionalGeneration(transformers.T5Config(**fields))
    theirs = sum(p.numel() for p in model.parameters())
    theirs += 32128 * 512 if version == "1.1" else 0  # their fresh model ties the output
    tokens = jnp.ones((1, 2), jnp.int32)
    module = config.seq2seq(32128, 32128, 0)
    shapes = jax.eval_shape(module.init, jax.random.key(0), tokens, tokens)
    assert sum(leaf.size for leaf in jax.tree.leaves(nn.unbox(shapes))) == theirs


@pytest.mark.parametrize(
  ("change", "words"),
  [
    ({"feed_forward_proj": "gated-silu"}, "feed_forward_proj"),
    ({"model_type": "bart"}, "model_type"),
    ({"num_layers": 3}, "has no tensor"),
    ({"num_layers": 1}, "no place for"),
    ({"d_model": 25}, "do not fit"),
  ],
)
def test_a_folder_that_is_no_such_t5_is_refused(change, words, tmp_path):
  make("first", "as many layers of heads that fill the width").save_pretrained(tmp_path)
  path = tmp_path / "config.json"
  path.write_text(json.dumps(json.loads(path.read_text()) | change))
  with pytest.raises(UserError, match=words):
    read_t5(tmp_path)
