from __future__ import annotations

from collections import Counter

import pytest

from cluster.errors import ConfigError
from drafter_service.training.vocabulary import choose_mask_id, choose_vocabulary


def test_special_ids_come_first_then_the_most_frequent() -> None:
    counts = Counter({7: 5, 3: 9, 8: 5, 2: 1})
    vocabulary = choose_vocabulary(counts, [0, 9], vocab_size=10, size=4)
    assert vocabulary.d2t.tolist() == [0, 3, 7, 9]  # 7 before 8: the lower id wins a tie
    assert vocabulary.t2d.tolist() == [0, -1, -1, 1, -1, -1, -1, 2, -1, 3]


def test_a_size_past_the_vocabulary_means_all_of_it() -> None:
    vocabulary = choose_vocabulary(Counter({3: 1}), [0], vocab_size=6, size=4096)
    assert vocabulary.d2t.tolist() == list(range(6))
    assert vocabulary.t2d.tolist() == list(range(6))


def test_special_ids_must_fit() -> None:
    with pytest.raises(ConfigError, match="draft_vocab_size = 2"):
        choose_vocabulary(Counter(), [0, 1, 2], vocab_size=10, size=2)


def test_the_mask_is_the_special_id_that_replies_use_least() -> None:
    counts = Counter({2: 100, 0: 1})
    assert choose_mask_id(counts, (0, 1, 2), 10) == 1
    assert choose_mask_id(counts, (0, 1, 2, 4), 10) == 4
    assert choose_mask_id(Counter({9: 1}), (), 10) == 8
