"""Het-PP in one file: replicas with and without compressed pipeline boundaries train one model in rounds of SparseLoCo.

    python docs/het_pp_in_one_file.py TEXT_FILE_OR_FOLDER

Everything is in one process and plain PyTorch, so nothing is sent; comments mark what would cross a link. Equations are
those of Het-PP ("Heterogeneous low-bandwidth pre-training"). Names follow the papers: M replicas, H inner steps, token
embedding TE [V, d], basis U [d, k] of the subspace S, P = U U^T. It shares no code with the package hetero_pp; a test
trains both from the same start on the same batches, and compares losses and parameters.
"""

import math
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass
class Settings:
    """Het-PP's values (its Table 9 and SparseLoCo's Table 9), but for sizes and rates that suit a CPU."""

    width: int = 64  # d
    layers: int = 4
    heads: int = 2
    feed_forward: int = 192
    vocabulary: int = 256
    sequence_length: int = 128  # L
    batch_size: int = 8
    steps: int = 10  # H
    rounds: int = 20
    learning_rate: float = 1e-2
    warmup_steps: int = 10
    weight_decay: float = 0.1
    rank: int = 8  # k: k/d = 1/8
    stages: tuple[int, ...] = (1, 1, 1, 1)  # layers of each stage of a compressed replica
    density: float = 1 / 32  # share of each chunk that is sent; the paper's 1/128 needs more rounds than 20
    tile: int = 64  # chunks are 64 x 64 tiles of a matrix
    decay: float = 0.95  # beta of error feedback
    outer_learning_rate: float = 1.0  # eta


# ---- the model: a LLaMA decoder ----


class Block(nn.Module):
    """x + attention(norm(x)), then x + SwiGLU(norm(x)); names are those of torchtitan and of the package."""

    def __init__(self, s: Settings) -> None:
        super().__init__()
        d, f = s.width, s.feed_forward
        self.heads = s.heads
        self.attention = nn.ModuleDict({name: nn.Linear(d, d, bias=False) for name in ("wq", "wk", "wv", "wo")})
        sizes = {"w1": (d, f), "w2": (f, d), "w3": (d, f)}
        self.feed_forward = nn.ModuleDict({name: nn.Linear(*size, bias=False) for name, size in sizes.items()})
        self.attention_norm, self.ffn_norm = nn.RMSNorm(d, eps=1e-5), nn.RMSNorm(d, eps=1e-5)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        normed = self.attention_norm(x)
        q, k, v = (self.attention[w](normed).view(batch, length, self.heads, -1) for w in ("wq", "wk", "wv"))
        q, k, v = rope(q).transpose(1, 2), rope(k).transpose(1, 2), v.transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention["wo"](out.transpose(1, 2).reshape(batch, length, width))
        w, normed = self.feed_forward, self.ffn_norm(x)
        return x + w["w2"](F.silu(w["w1"](normed)) * w["w3"](normed))


def rope(x: Tensor) -> Tensor:
    """Rotate pairs of dimensions of each head [b, L, heads, e] by the position. It replaces the papers' PosEmbed."""
    length, size = x.shape[1], x.shape[3]
    frequencies = 10000.0 ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    angles = torch.outer(torch.arange(length, dtype=torch.float64), frequencies)[:, None]
    cosine, sine = angles.cos().float(), angles.sin().float()
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack([even * cosine - odd * sine, even * sine + odd * cosine], dim=-1).flatten(-2)


class Model(nn.Module):
    def __init__(self, s: Settings) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(s.vocabulary, s.width)
        self.layers = nn.ModuleList(Block(s) for _ in range(s.layers))
        self.norm, self.lm_head = nn.RMSNorm(s.width, eps=1e-5), nn.Linear(s.width, s.vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.05 if "tok_embeddings" in name else 0.8 / math.sqrt(s.width))
            if name.endswith(("wo.weight", "w2.weight")):
                nn.init.normal_(parameter, std=0.04 / math.sqrt(2 * s.layers))

    def loss(self, tokens: Tensor, subspace: "Subspace | None" = None) -> Tensor:
        """Return the mean cross entropy of tokens [b, L + 1] in nats, through boundaries if they are compressed."""
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = self.tok_embeddings(inputs)
        for index, block in enumerate(self.layers):
            x = block(x)
            if subspace is not None and index in subspace.after:
                x = subspace.cross(x, inputs)
        return F.cross_entropy(self.lm_head(self.norm(x)).flatten(0, 1), targets.flatten())


# ---- compressed boundaries and the embedding (Het-PP, sections 2.2 and 2.4) ----


class Subspace:
    """A compressed replica has this beside a model: boundaries between its stages, and a split token embedding.

    TE = T_perp + T_S. T_perp is fixed between rounds; of T_S = C U^T, only C [V, k] is trained, so T_S stays in S.
    """

    def __init__(self, s: Settings, basis: Tensor) -> None:
        # The last layers of all stages but the last one, whose output is not compressed.
        self.after = {sum(s.stages[: index + 1]) - 1 for index in range(len(s.stages) - 1)}
        self.basis, self.perpendicular = basis, torch.zeros(s.vocabulary, s.width)
        self.coefficients = nn.Parameter(torch.zeros(s.vocabulary, s.rank))

    def cross(self, x: Tensor, tokens: Tensor) -> Tensor:
        """Return X^ = X~ U^T + T_perp[x]. The coefficients X~ = X U [b, L, k] are what is sent.

        The paper sends (X - T_perp[x]) U, which is the same because T_perp U = TE (I - U U^T) U = 0. Autograd gives the
        gradient (G U) U^T, whose G U [b, L, k] is sent back. Token ids travel beside the coefficients.
        """
        return (x @ self.basis) @ self.basis.T + self.perpendicular[tokens]

    @torch.no_grad()
    def split(self, embedding: Tensor) -> None:
        """Split TE: T_S <- TE U U^T, T_perp <- TE - T_S. Equations 3 and 4 give the same, as their sum stays TE."""
        self.coefficients.copy_(embedding @ self.basis)
        self.perpendicular = embedding - self.coefficients @ self.basis.T


# ---- the inner loop of a replica (equation 1) ----


class Replica:
    """A replica. Its optimizer's moments and its error feedback stay between rounds; the parameters are replaced."""

    def __init__(self, s: Settings, theta: dict[str, Tensor], subspace: Subspace | None = None) -> None:
        """Without a `subspace` it is a datacenter's replica, with full activations."""
        self.s, self.model, self.subspace = s, Model(s), subspace
        self.errors = {name: torch.zeros_like(one) for name, one in theta.items()}  # e of equation 2
        self.embedding = self.model.tok_embeddings.weight
        matrices = [one for one in self.model.parameters() if one.ndim == 2]
        if subspace is not None:
            matrices[0] = subspace.coefficients  # in place of the embedding
        norms = [one for one in self.model.parameters() if one.ndim == 1]
        groups = [{"params": matrices, "weight_decay": s.weight_decay}, {"params": norms, "weight_decay": 0.0}]
        self.adamw = torch.optim.AdamW(groups, betas=(0.9, 0.95))
        self.synchronise(theta)

    @torch.no_grad()
    def synchronise(self, theta: dict[str, Tensor]) -> None:
        """Start a round from the parameters of all, and split the embedding again (equations 3 and 4)."""
        self.model.load_state_dict(theta)
        if self.subspace is not None:
            self.subspace.split(theta["tok_embeddings.weight"])

    def step(self, number: int, tokens: Tensor) -> float:
        """Take inner step `number` of the run, from 0, and return its loss in nats."""
        loss, subspace = self.model.loss(tokens, self.subspace), self.subspace
        loss.backward()
        nn.utils.clip_grad_norm_([one for _, one in sorted(self.model.named_parameters())], 1.0)
        if subspace is not None and self.embedding.grad is not None:
            subspace.coefficients.grad = (
                self.embedding.grad @ subspace.basis
            )  # by the chain rule of TE = T_perp + C U^T
        for group in self.adamw.param_groups:
            group["lr"] = self.rate(number)
        self.adamw.step()
        self.model.zero_grad()
        if subspace is not None:
            with torch.no_grad():
                self.embedding.copy_(subspace.perpendicular + subspace.coefficients @ subspace.basis.T)
        return loss.item()

    def rate(self, number: int) -> float:
        """Return the learning rate: linear warm-up, then a cosine down to a tenth over the steps of the whole run."""
        s = self.s
        if number < s.warmup_steps:
            return s.learning_rate * (number + 1) / s.warmup_steps
        share = (number - s.warmup_steps) / max(1, s.steps * s.rounds - s.warmup_steps)
        return s.learning_rate * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * share)))


# ---- the outer round: SparseLoCo (equation 2) ----


def top_k(error: Tensor, s: Settings) -> Tensor:
    """Return the tensor with only the largest magnitudes of each 64 x 64 tile, or of a whole vector; the rest is 0.

    A partial tile keeps the same share, not the same number. Values are not quantised, as in Het-PP: Q(x) = x.
    """
    sent, size = torch.zeros_like(error), s.tile if error.ndim == 2 else error.numel()
    for rows in range(0, error.shape[0], size):
        for columns in range(0, error.shape[1] if error.ndim == 2 else 1, size):
            where = (slice(rows, rows + size), slice(columns, columns + size))[: error.ndim]
            chunk = error[where].flatten()
            kept = chunk.abs().sort(descending=True, stable=True).indices[: max(1, round(s.density * len(chunk)))]
            sent[where] = torch.zeros_like(chunk).index_copy(0, kept, chunk[kept]).view(error[where].shape)
    return sent


@torch.no_grad()
def outer_round(theta: dict[str, Tensor], replicas: list[Replica], s: Settings) -> None:
    """Change theta by the mean of what the replicas send, and give it to all of them."""
    for name, start in theta.items():
        total = torch.zeros_like(start)
        for replica in replicas:  # a sum over the network; only `sent` crosses it
            error = replica.errors[name]
            error.mul_(s.decay).add_(start - replica.model.get_parameter(name))  # e <- beta e + Delta
            sent = top_k(error, s)
            error.sub_(sent)  # e <- e - D
            total.add_(sent)
        start.sub_(total / len(replicas) * s.outer_learning_rate)  # theta <- theta - eta mean(D)
    for replica in replicas:
        replica.synchronise(theta)


def main(path: str) -> None:
    files = sorted(one for one in [Path(path), *Path(path).rglob("*")] if one.is_file())
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    s = Settings()
    torch.manual_seed(0)
    theta = {name: one.detach().clone() for name, one in Model(s).named_parameters()}
    basis = torch.linalg.qr(torch.randn(s.width, s.rank))[0]  # one U serves all boundaries of all replicas
    replicas = [Replica(s, theta, Subspace(s, basis) if is_compressed else None) for is_compressed in (0, 0, 1, 1)]

    def batch(first: int, last: int) -> Tensor:
        starts = torch.randint(first, last - s.sequence_length, (s.batch_size,)).tolist()
        return torch.stack([text[start : start + s.sequence_length + 1] for start in starts]).long()

    held_out = len(text) * 9 // 10
    validation = [batch(held_out, len(text)) for _ in range(8)]
    for round_ in range(s.rounds):
        for replica in replicas:  # at the same time, on machines of their own
            for step in range(round_ * s.steps, (round_ + 1) * s.steps):
                replica.step(step, batch(0, held_out))
        outer_round(theta, replicas, s)
        with torch.no_grad():
            own = [sum(r.model.loss(one, r.subspace).item() for one in validation) / 8 for r in replicas]
        print(f"round {round_ + 1}: validation loss {own[0]:.3f} with full, {own[-1]:.3f} with compressed activations")


if __name__ == "__main__":
    main(sys.argv[1])
