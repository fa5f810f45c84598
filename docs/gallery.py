"""Draws docs/gallery: what each named norm computes, over an image and over a text.

python docs/gallery.py

The same versions of the packages draw the same files, byte for byte.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from axisnorm import Scheme, compare, explain, identify
from axisnorm.lens.family import Family, family_of
from axisnorm.lens.rendering import figures

IMAGE = (2, 4, 2, 2)  # N, C, H, W
TEXT = (2, 3, 4)  # B, S, D

IMAGE_NORMS = {
    "batch_norm": ("BatchNorm2d(4)", "[n] c [h w]; affine=c"),
    "batch_norm_eval": ("BatchNorm2d(4) in eval mode", "[n] c [h w]; affine=c; statistics=running"),
    "instance_norm": ("InstanceNorm2d(4)", "n c [h w]; affine=c"),
    "group_norm": ("GroupNorm(2, 4)", "n (g=2 [c]) [h w]; affine=g c"),
    "group_norm_1": ("GroupNorm(1, 4)", "n [c h w]; affine=c"),
    "layer_norm_chw": ("LayerNorm((4, 2, 2))", "n [c h w]; affine=c h w"),
    "layer_norm_w": ("LayerNorm(2)", "n c h [w]; affine=w"),
    "layer_norm_2d": ("LayerNorm2d(4)", "n [c] h w; affine=c; eps=1e-6"),
}

TEXT_NORMS = {
    "layer_norm": ("LayerNorm(4)", "b s [d]; affine=d"),
    "rms_norm": ("RMSNorm(4)", "b s [d]; affine=d; center=false; eps=none"),
    "layer_norm_sd": ("LayerNorm((3, 4))", "b [s d]; affine=s d"),
    "batch_norm_of_the_picture": ("the picture's batch norm for text", "[b] s [d]; affine=s"),
    "batch_norm_of_features": ("BatchNorm1d(4) over all tokens", "[b s] d; affine=d"),
    "instance_norm": ("InstanceNorm1d(4) over positions", "b [s] d; affine=d"),
    "qk_norm": ("QK norm of 2 heads", "b s (h=2 [d]); affine=h d"),
}

# Input and output of a question on LayerNorm, as printed there: which formula was computed?
ASKED = np.array([[-2.1918, 1.2574, -0.3838, 1.3870]])
ANSWERED = np.array([[-1.7049, 0.9572, -0.3095, 1.0572]])


def drawings() -> Iterator[tuple[str, Figure]]:
    """Every file's name and figure."""
    for kind, shape, norms in (("image", IMAGE, IMAGE_NORMS), ("text", TEXT, TEXT_NORMS)):
        explained = [explain(scheme, shape) for _, scheme in norms.values()]
        titles = [title for title, _ in norms.values()]
        yield f"{kind}.svg", figures.tensors(explained, titles)
        for name, explanation in zip(norms, explained, strict=True):
            yield f"{kind}-{name}.svg", explanation.figure()
    yield "image-family.svg", figures.family(named_family(IMAGE))
    yield "text-family.svg", figures.family(named_family(TEXT))
    both = compare("bert.layer_norm", "[b] s [d]; affine=s", TEXT)
    yield "compare.svg", both.figure()
    yield "identify.svg", identify(ASKED, ANSWERED).figure()


def named_family(shape: tuple[int, ...]) -> Family:
    """The map of the named norms, with none of them marked."""
    layer = Scheme.layer_norm()
    found = family_of(layer, layer, shape)
    unmarked = (replace(node, holds_a=False, holds_b=False) for node in found.nodes)
    return replace(found, nodes=tuple(unmarked))


def main(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for name, figure in drawings():
        figures.save(figure, folder / name)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "gallery")
