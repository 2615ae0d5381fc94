"""Recurrent independent mechanisms in PyTorch, written module by module from the equations.

Source: Kolios 2023, equations 4.27 to 4.31.
"""

from typing import Any

import numpy as np


class TorchRims:
  """One cell, made of the parameters of ours.

  Attributes:
    weights: by our names, to read gradients from.
  """

  def __init__(self, config: Any, params: Any, place: str = "cpu"):
    import torch

    self.config, self.torch = config, torch
    self.weights = {
      name: torch.tensor(np.array(value)).to(place).requires_grad_()
      for name, value in params.items()
    }

  def __call__(self, x: Any, state: Any) -> Any:
    """One step: x [batch, embed], h and c [batch, modules, dim]; c None for GRUs."""
    torch, c, w, (h, cell) = self.torch, self.config, self.weights, state
    rows = torch.stack([torch.zeros_like(x), x], dim=1)  # [batch, rows, embed]
    keys, values = rows @ w["input_key"], rows @ w["input_value"]
    read, null = [], []
    for k in range(c.modules):  # (4.27)
      query = h[:, k] @ w["input_query"][k]
      scores = torch.einsum("bd,brd->br", query, keys) / c.input_key_dim**0.5
      weights = torch.softmax(scores, dim=-1)
      read.append(torch.einsum("br,brd->bd", weights, values))
      null.append(weights[:, 0])
    order = torch.argsort(torch.stack(null, dim=1), dim=1, stable=True)
    active = torch.zeros_like(order, dtype=torch.bool)
    active.scatter_(1, order[:, : c.active], True)
    stepped, cells = [], []
    for k in range(c.modules):  # (4.28), (4.29)
      new_h, new_c = self._step(k, read[k], h[:, k], None if cell is None else cell[:, k])
      on = active[:, k, None]
      stepped.append(torch.where(on, new_h, h[:, k]))
      if cell is not None:
        cells.append(torch.where(on, new_c, cell[:, k]))
    after = [
      torch.where(active[:, k, None], stepped[k] + self._read(k, stepped), stepped[k])
      for k in range(c.modules)
    ]
    state = torch.stack(after, dim=1), torch.stack(cells, dim=1) if cells else None
    return state[0].flatten(1), state

  def _step(self, k: int, read: Any, h: Any, cell: Any) -> Any:
    torch, w, kernel = self.torch, self.weights, self.weights["recurrent"][k]
    added = read @ w["input"][k] + w["bias"][k]
    if cell is not None:
      i, f, g, o = (added + h @ kernel).chunk(4, dim=-1)
      cell = torch.sigmoid(f) * cell + torch.sigmoid(i) * torch.tanh(g)
      return torch.sigmoid(o) * torch.tanh(cell), cell
    (ar, az, an), (ur, uz, un) = added.chunk(3, dim=-1), (h @ kernel).chunk(3, dim=-1)
    n = torch.tanh(an + torch.sigmoid(ar + ur) * (un + w["candidate_bias"][k]))
    z = torch.sigmoid(az + uz)
    return (1 - z) * n + z * h, None

  def _read(self, k: int, h: Any) -> Any:  # (4.30), (4.31)
    torch, c, w = self.torch, self.config, self.weights
    query = (h[k] @ w["query"][k]).unflatten(-1, (c.heads, c.head_dim))
    keys, values = (
      torch.stack([h[j] @ w[name][j] for j in range(c.modules)], dim=1).unflatten(
        -1, (c.heads, c.head_dim)
      )
      for name in ("key", "value")
    )
    scores = torch.einsum("bnd,bjnd->bnj", query, keys) / c.head_dim**0.5
    read = torch.einsum("bnj,bjnd->bnd", torch.softmax(scores, dim=-1), values)
    return read.flatten(1) @ w["output"][k]
