"""Sharded parameters shown to PyTorch: every check compares with one process that has the whole tensors.

Run with `python -m unittest tests/python/ragged_test.py`; RANKS_VERBOSE=1 shows the time of every check.
"""

import math
import pathlib
import sys
import unittest

import torch

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "python")]

import ragged_checkpoint_checks  # noqa: E402
import ragged_optimizer_checks  # noqa: E402
import ragged_tensor_checks  # noqa: E402
import ranks  # noqa: E402
from dovetail.runs import boxes, check_intervals  # noqa: E402

MODULES = (ragged_tensor_checks, ragged_optimizer_checks, ragged_checkpoint_checks)


class Runs(unittest.TestCase):
    def test_boxes_hold_every_element_of_the_run_once(self):
        for shape in ((), (7,), (3, 4), (2, 3, 2), (1, 3, 1, 2)):
            whole = torch.arange(math.prod(shape)).view(shape)
            for begin in range(whole.numel() + 1):
                for end in range(begin, whole.numel() + 1):
                    found = boxes(begin, end, shape)
                    self.assertLessEqual(len(found), max(2 * len(shape) - 1, 1))
                    seen = []
                    for offsets, sizes, start in found:
                        box = whole[tuple(slice(o, o + s) for o, s in zip(offsets, sizes))]
                        self.assertEqual(tuple(box.shape), tuple(sizes))
                        self.assertEqual(box.reshape(-1)[0].item(), start)
                        seen += box.reshape(-1).tolist()
                    self.assertEqual(seen, list(range(begin, end)))

    def test_intervals_that_do_not_tile_are_refused(self):
        self.assertEqual(check_intervals([(4, 4), (2, 5), (0, 2)], 5), ((4, 4), (2, 5), (0, 2)))
        for wrong in ([(0, 2), (3, 5)], [(0, 3), (2, 5)], [(0, 4)], [(0, 6)], [(3, 2), (0, 5)]):
            with self.assertRaises(ValueError):
                check_intervals(wrong, 5)


class OnRanks(ranks.Checks):
    def test_two_ranks(self):
        self.on(2, *MODULES)

    def test_four_ranks(self):
        self.on(4, *MODULES)


if __name__ == "__main__":
    unittest.main()
