from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from ktplan.convert.cpu import convert_cpu
from ktplan.model import open_source
from ktplan.quant.scheme import Scheme
from ktplan.rules import HYBRID, Match, Replace, Rule, Rules

StoreOf = Callable[..., Path]


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """These matrices are too small to share between threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def store_of(tmp_path_factory: pytest.TempPathFactory) -> StoreOf:
    """`store_of(model, bits=8, parts=1)`: an expert store of a model, made once a session."""
    made: dict[tuple[Path, int, int], Path] = {}

    def make(model: Path, bits: int = 8, parts: int = 1) -> Path:
        key = (model, bits, parts)
        if key not in made:
            folder = tmp_path_factory.mktemp("stores") / f"{model.name}-int{bits}-{parts}"
            convert_cpu(open_source(model), folder, Scheme(bits=bits), numa_parts=parts)
            made[key] = folder
        return made[key]

    return make


@pytest.fixture(scope="session")
def hybrid() -> Callable[[str], Rules]:
    """`hybrid("0-3,7")`: rules that put these experts of every layer on the GPU side."""

    def make(experts: str) -> Rules:
        return Rules(
            (
                Rule(
                    match=Match(name=r"\.experts$"),
                    replace=Replace(class_name=HYBRID, kwargs={"gpu_experts": experts}),
                    recursive=False,
                ),
            )
        )

    return make
