"""Reported problems with alignment and shapes, as planning cases."""

from __future__ import annotations

import numpy as np

from padless import microbatch, pack
from padless.shapes import combine_multiples, ladder, round_up, snap


def test_j01_rounding_holds_for_every_shard() -> None:
    """ms-swift#9723."""
    plan = pack([31_936], 40_000, multiple_of=4 * 32)
    assert plan.group_tokens.tolist() == [32_000]
    assert plan.group_tokens[0] // 4 % 32 == 0


def test_j03_each_sequence_is_rounded_for_context_parallelism() -> None:
    """TransformerEngine#1930, Megatron-LM#1669."""
    plan = pack([4, 8, 6, 10], 32, method="next-fit", sequence_multiple_of=2 * 2)
    assert plan.order.tolist() == [0, 1, 2, 3]
    assert round_up(plan.slot_lengths, 4).tolist() == [4, 8, 8, 12]
    assert plan.group_tokens.tolist() == [32]
    assert pack([7], 8, sequence_multiple_of=4).group_tokens.tolist() == [8]


def test_j04_several_multiples_combine_by_their_least_common_multiple() -> None:
    """RL#971, SkyRL#1828."""
    assert combine_multiples(3, 2 * 2) == 12
    assert combine_multiples(3, 2 * 2, 16) == 48
    assert microbatch([20], 100, multiple_of=(3, 4, 16)).widths.tolist() == [48]


def test_j05_compiled_models_see_few_widths() -> None:
    """pytorch#188150, open-instruct#1445."""
    lengths = np.arange(1, 513)
    assert sorted(set(round_up(lengths, 64).tolist())) == list(range(64, 513, 64))
    widths = ladder(lengths, 8)
    assert len(widths) == 8
    assert widths.tolist() == list(range(64, 513, 64))
    plan = microbatch(lengths, 4096, ladder=[128, 256, 512])
    assert set(plan.widths.tolist()) <= {128, 256, 512}
    assert snap(np.array([100]), widths).tolist() == [128]


def test_j06_totals_are_rounded_to_the_mask_block() -> None:
    """Bagel#254."""
    assert pack([40_000], 50_000, multiple_of=128).group_tokens.tolist() == [40_064]
    plan = pack([39_936, 64], 40_000, multiple_of=128)
    assert plan.group_tokens.max() <= 39_936
    assert len(plan) == 2
