"""The checker of samplers accepts right ones and catches each way of being wrong."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from padless import PadlessError
from padless.verify import ResumeError, assert_rescalable, assert_resumable


class Shuffled:
    """A right sampler: seed, epoch and place are its whole state."""

    def __init__(self, size: int = 6, ranks: int = 1, rank: int = 0) -> None:
        self.size, self.ranks, self.rank = size, ranks, rank
        self.epoch = self.place = 0
        self.at_step_boundary = True

    def set_epoch(self, epoch: int) -> None:
        self.epoch, self.place = epoch, 0

    def __iter__(self):
        order = np.random.default_rng(self.epoch).permutation(self.size).tolist()
        while self.place < self.size:
            mine = order[self.place : self.place + self.ranks][self.rank : self.rank + 1]
            self.place += self.ranks
            yield mine
        self.epoch, self.place = self.epoch + 1, 0

    def state_dict(self):
        return {"epoch": self.epoch, "place": self.place}

    def load_state_dict(self, state):
        self.epoch, self.place = state["epoch"], state["place"]


@given(size=st.integers(1, 12), epochs=st.integers(1, 3), through=st.sampled_from(["json", "pickle", "copy"]))
def test_a_right_sampler_passes_and_every_restore_is_counted(size, epochs, through):
    done = assert_resumable(lambda: Shuffled(size), epochs=epochs, through=through)
    assert done.steps == size * epochs
    assert done.restores == (4 * size + 1) * epochs


def test_state_dict_that_forgets_the_epoch_is_caught():
    class Forgets(Shuffled):
        def load_state_dict(self, state):
            self.place = state["place"]

    assert_resumable(Forgets)  # epoch 0 hides it
    with pytest.raises(ResumeError, match=r"restored after 0 items: item 0 of the rest is .* was due"):
        assert_resumable(Forgets, epochs=2)


def test_state_is_only_right_the_first_time_is_caught():
    class Offset(Shuffled):
        def __init__(self):
            super().__init__()
            self.loaded = 0

        def load_state_dict(self, state):
            super().load_state_dict(state)
            self.loaded += 1
            self.place += self.loaded > 1

    with pytest.raises(ResumeError, match="restored twice after 0 items"):
        assert_resumable(Offset)


def test_state_of_a_restored_object_that_starts_from_zero_is_caught():
    class Relative(Shuffled):
        def __init__(self):
            super().__init__()
            self.start = 0

        def load_state_dict(self, state):
            super().load_state_dict(state)
            self.start = self.place

        def state_dict(self):
            return {"epoch": self.epoch, "place": self.place - self.start}

    with pytest.raises(ResumeError, match="restored at every one of 3 items"):
        assert_resumable(Relative)


def test_live_state_is_caught():
    class Live(Shuffled):
        def __init__(self):
            super().__init__()
            self.shared = {}

        def state_dict(self):
            self.shared.update(super().state_dict())
            return self.shared

    with pytest.raises(ResumeError, match="must return a copy"):
        assert_resumable(Live)


def test_saving_that_moves_the_iteration_is_caught():
    class Moves(Shuffled):
        def state_dict(self):
            state = super().state_dict()
            self.place += self.place == 2
            return state

    with pytest.raises(ResumeError, match="iterated without saving"):
        assert_resumable(Moves)


def test_the_epoch_repeated_after_its_last_item_is_caught():
    class Repeats(Shuffled):
        def load_state_dict(self, state):
            super().load_state_dict(state)
            self.place %= self.size

    with pytest.raises(ResumeError, match="restored after the last item"):
        assert_resumable(Repeats)


def test_arrays_are_compared_by_value_and_endless_streams_by_their_first_items():
    class Stream:
        def __init__(self, jump: int = 0) -> None:
            self.place, self.jump = 0, jump

        def __iter__(self):
            while True:
                self.place += 1
                yield {"ids": np.arange(self.place), "none": float("nan")}

        def state_dict(self):
            return {"place": self.place}

        def load_state_dict(self, state):
            self.place = state["place"] + self.jump

    assert assert_resumable(Stream, max_steps=5).steps == 5
    with pytest.raises(ResumeError):
        assert_resumable(lambda: Stream(1), max_steps=5)


def test_bad_uses_are_refused_with_the_reason():
    with pytest.raises(PadlessError, match="has no state_dict"):
        assert_resumable(lambda: [1, 2])
    with pytest.raises(PadlessError, match="yields no item"):
        assert_resumable(lambda: Shuffled(0))
    with pytest.raises(PadlessError, match="choose one of 'json'"):
        assert_resumable(Shuffled, through="xml")
    with pytest.raises(PadlessError, match="max_steps=0"):
        assert_resumable(Shuffled, max_steps=0)

    class Bytes(Shuffled):
        def state_dict(self):
            return {"place": {1, 2}}

    with pytest.raises(PadlessError, match="not plain JSON"):
        assert_resumable(Bytes, through="json")


def test_moving_to_other_numbers_of_ranks_loses_and_repeats_nothing():
    assert assert_rescalable(lambda ranks, rank: Shuffled(12, ranks, rank), ranks=(1, 2, 3)).restores > 50


def test_a_place_counted_in_micro_steps_of_the_old_ranks_is_caught():
    class Micro(Shuffled):
        def state_dict(self):
            return {"epoch": self.epoch, "place": self.place // self.ranks}

        def load_state_dict(self, state):
            self.epoch, self.place = state["epoch"], state["place"] * self.ranks

    with pytest.raises(ResumeError, match=r"moved from 1 to 2 ranks after 1 of 12 micro-batches: lost \[\d+\]"):
        assert_rescalable(lambda ranks, rank: Micro(12, ranks, rank), ranks=(1, 2))


def test_states_inside_an_optimizer_step_are_not_moved_to_other_ranks():
    class Steps(Shuffled):
        """Inside a step of four sequences the place is rounded down, which would repeat sequences."""

        def __iter__(self):
            for item in super().__iter__():
                self.at_step_boundary = self.place % 4 == 0 or self.place >= self.size
                yield item

        def state_dict(self):
            return {"epoch": self.epoch, "place": self.place // 4 * 4}

    assert_rescalable(lambda ranks, rank: Steps(12, ranks, rank), ranks=(1, 2, 4))
    Steps.at_step_boundary = property(lambda self: True, lambda self, value: None)
    with pytest.raises(ResumeError, match="repeated or new"):
        assert_rescalable(lambda ranks, rank: Steps(12, ranks, rank), ranks=(1, 2, 4))
