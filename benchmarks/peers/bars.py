"""What a layer should reach, as ratios taken side by side, and whether it does: for 16- and 8-bit activations apart."""

from __future__ import annotations

from collections.abc import Iterator

from side_by_side import SHAPES

from peers.results import Results

LARGE = "dsv3"  # the shape with large experts


class Judge:
    """The figures of one shape and one width of activations; None wherever something was not measured."""

    def __init__(self, results: Results, shape: str, threads: int, activation: str) -> None:
        self.results, self.shape, self.threads, self.activation = results, shape, threads, activation

    def ours(self, form: str, tokens: int) -> float | None:
        name = f"ktplan {form} {self.activation}"
        return self.results.seconds(self.shape, tokens, self.threads, name)

    def theirs(self, tokens: int, *names: str) -> float | None:
        times = [
            seconds
            for name in names
            for threads in (self.threads, 1)
            if (seconds := self.results.seconds(self.shape, tokens, threads, name)) is not None
        ]
        return min(times, default=None)

    def times(self, form: str, tokens: int, *names: str) -> float | None:
        """How many times as fast as the best of these peers."""
        ours, theirs = self.ours(form, tokens), self.theirs(tokens, *names)
        return theirs / ours if ours and theirs else None

    def times_best(self, form: str, tokens: int) -> float | None:
        size = self.results.bytes[f"ktplan {form}"]
        ours = self.ours(form, tokens)
        best = self.results.best_peer(self.shape, tokens, self.threads, size)
        return best[1] / ours if ours and best else None

    def of(self, which: int, form: str, tokens: int) -> float | None:
        """Of the limit by memory (0) or by arithmetic (1)."""
        ours = self.ours(form, tokens)
        floor = self.results.floors(self.shape, tokens, self.threads, f"ktplan {form} {self.activation}")[
            which
        ]
        return floor / ours if ours and floor else None


def judged(
    results: Results, shape: str, threads: int, activation: str
) -> Iterator[tuple[str, float | None, float]]:
    """(what, reached, bar); more is better in every row."""
    judge = Judge(results, shape, threads, activation)
    large = shape == LARGE
    four_bits = [form for form in ("int4", "int4-g32") if judge.ours(form, 1) or judge.ours(form, 32)]
    for form in ("int8", *four_bits):
        yield f"1 token, {form}: of read bandwidth", judge.of(0, form, 1), 0.90 if large else 0.80
    for form in ("int8", *four_bits):
        yield f"4 tokens, {form}: of read bandwidth", judge.of(0, form, 4), 0.80
    yield "1 token, int4-g32: x ggml Q4_K repacked", judge.times("int4-g32", 1, "ggml Q4_K repacked"), 1.0
    for form, kt in (("int8", "AMXINT8"), ("int4", "AMXINT4")):
        names = (f"kt-kernel {kt}", f"kt-kernel {kt}, 1 thread")
        yield f"1 token, {form}: x kt-kernel {kt}, its better thread count", judge.times(form, 1, *names), 3.0
    kt8 = "kt-kernel AMXINT8"
    yield "32 tokens, int8: x kt-kernel AMXINT8", judge.times("int8", 32, kt8), 3.0 if large else 2.5
    for form in four_bits:
        yield f"32 tokens, {form}: x the best peer", judge.times_best(form, 32), 1.25
    yield "256 tokens, int8: x kt-kernel AMXINT8", judge.times("int8", 256, kt8), 3.0
    yield "256 tokens, int8: x the best peer", judge.times_best("int8", 256), 1.5
    yield "1024 tokens, int8: x kt-kernel AMXINT8", judge.times("int8", 1024, kt8), 3.5
    yield "1024 tokens, int8: x the best peer", judge.times_best("int8", 1024), 1.1
    yield "1024 tokens, int8: of the int8 peak", judge.of(1, "int8", 1024), 0.70 if large else 0.55
    own = judge.ours("int8", 1024)
    for form in four_bits:
        mine = judge.ours(form, 1024)
        yield f"1024 tokens, {form}: x ktplan's int8", own / mine if own and mine else None, 0.85
    yield "1024 tokens, bf16: of the bf16 peak", judge.of(1, "bf16", 1024), 0.75


def verdicts(results: Results, shapes: list[str], threads: int) -> Iterator[list[str]]:
    for shape in shapes:
        if shape not in SHAPES:
            continue
        for activation in ("a16", "a8"):
            for what, reached, bar in judged(results, shape, threads, activation):
                if reached is None:
                    verdict = ["not measured", ""]
                elif reached >= bar:
                    verdict = [f"{reached:.2f}", "met"]
                else:
                    verdict = [f"{reached:.2f}", f"NOT met: {reached / bar - 1:+.0%}"]
                yield [shape, activation, what, f">= {bar:.2f}", *verdict]
