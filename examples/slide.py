"""An encoder of pathology slides: tiles with places in the plane, and a class token without.

    python examples/slide.py                     # two minutes
    python examples/slide.py --variant none      # without places: no better than guessing

`linbias.torch.PointAttention` takes the tiles' places: scores fall with the
distance between two tiles, and `global_tokens=1` leaves the class token out of that, as TITAN has
it (Ding et al., 2024). Slides are made up: a grid of tiles of which some are background and left
out, and of the others some are tumour, in one patch or scattered. Which of the two is the
question, and only the places tell. Slides have more or less tissue: in a batch the smaller ones
are padded, and `key_padding_mask` says where, so that no tile sees padding and no time goes into
it. The table shows how often the answer is right for slides of the size of training, and larger
ones.
"""

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from linbias.torch import PointAttention


class Layer(nn.Module):
    def __init__(self, width: int, num_heads: int, variant: str) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attention = PointAttention(width, num_heads, variant=variant, global_tokens=1)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor, points: Tensor, padding: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x), points, key_padding_mask=padding)[0]
        return x + self.mlp(self.norms[1](x))


class SlideEncoder(nn.Module):
    """Tiles [B, N] of two kinds at points [B, N, 2] -> logits [B, 2]: scattered, or one patch.

    padding: [B, N], True where a slide has no more tiles.
    """

    def __init__(self, width: int, num_heads: int, num_layers: int, variant: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(2, width)  # in the place of features of a tile
        self.class_token = nn.Parameter(torch.zeros(width))
        self.layers = nn.ModuleList([Layer(width, num_heads, variant) for _ in range(num_layers)])
        self.out = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2))

    def forward(self, tiles: Tensor, points: Tensor, padding: Tensor) -> Tensor:
        padding = nn.functional.pad(padding, (1, 0))  # the class token is none
        token = self.class_token.expand(len(tiles), 1, -1)
        x = torch.cat((token, self.embed(tiles)), dim=1)
        for layer in self.layers:
            x = layer(x, points, padding)
        return self.out(x[:, 0])


def slides(
    batch: int, side: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tiles [B, N], points [B, N, 2] in pixels, padding [B, N], and whether the tumour is one
    patch, [B].
    """
    share = 0.3 + 0.5 * torch.rand(batch, 1, generator=generator)  # of the tiles that is tissue
    num_tiles = (share * side**2).long()
    most = int(num_tiles.max())
    padding = torch.arange(most) >= num_tiles
    cells = torch.rand(batch, side**2, generator=generator).argsort(1)[:, :most]
    points = torch.stack((cells // side, cells % side), dim=-1).float()
    one_patch = torch.randint(2, (batch,), generator=generator)
    # The first eighth is tumour: in a random order, or by the distance from a random tile.
    apart = (points - points[:, :1]).norm(dim=-1)
    order = torch.where(
        one_patch[:, None] == 1, apart, torch.rand(apart.shape, generator=generator)
    )
    order = order.masked_fill(padding, torch.inf)
    tiles = (order.argsort(1).argsort(1) < num_tiles // 8).long()
    return tiles, 512 * points, padding, one_patch


def train(model: SlideEncoder, side: int, batch: int, steps: int) -> None:
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(steps):
        tiles, pixels, padding, one_patch = slides(batch, side, generator)
        points = pixels / 512  # in units of tiles
        loss = cross_entropy(model(tiles, points, padding), one_patch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)


@torch.no_grad()
def test(model: SlideEncoder, side: int, num_slides: int) -> float:
    """Share of right answers."""
    model.eval()
    generator = torch.Generator().manual_seed(1)
    tiles, pixels, padding, one_patch = slides(num_slides, side, generator)
    answers = model(tiles, pixels / 512, padding).argmax(1)
    return (answers == one_patch).float().mean().item()


def main(arguments: Sequence[str] | None = None) -> dict[int, float]:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--variant", choices=("symmetric", "none"), default="symmetric")
    sizes = {"steps": 400, "side": 8, "batch": 64, "width": 64, "heads": 8, "layers": 2}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--test-sides", type=int, nargs="+", default=[8, 12, 16, 24])
    parser.add_argument("--test-slides", type=int, default=200)
    chosen = parser.parse_args(arguments)
    torch.manual_seed(0)
    model = SlideEncoder(chosen.width, chosen.heads, chosen.layers, chosen.variant)
    train(model, chosen.side, chosen.batch, chosen.steps)
    results = {n: test(model, n, chosen.test_slides) for n in chosen.test_sides}
    print(f"trained on slides of {chosen.side} x {chosen.side} tiles; right answers:")
    for side, share in results.items():
        print(f"{side:>4} x {side:<4} {share:.0%}")
    return results


if __name__ == "__main__":
    main()
