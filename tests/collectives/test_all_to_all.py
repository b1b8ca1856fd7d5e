import torch

import diffcoll as dc


def test_it_transposes_the_blocks(run, gradients):
    xs = [[1.0, 2.0, 3.0], [10.0, 20.0, 30.0], [100.0, 200.0, 300.0]]
    got = [y.tolist() for y in run(lambda x: dc.all_to_all(torch.tensor(x)), xs)]
    assert got == [[1, 10, 100], [2, 20, 200], [3, 30, 300]]
    # x_r's block s is in ℓ_s, at position r, with weight w_s (r + 1)
    place = torch.tensor([1.0, 2.0, 3.0])
    assert gradients(lambda x, w: w * (dc.all_to_all(x) * place).sum(), xs, [5.0, 7.0, 11.0]) == [
        [5, 7, 11],
        [10, 14, 22],
        [15, 21, 33],
    ]


def test_from_one_dim_to_another(run):
    """Rows of all columns to columns of all rows: from one sharding of a matrix to the other."""
    whole = torch.arange(36).reshape(6, 6)
    got = run(lambda r: dc.all_to_all(whole[2 * r : 2 * r + 2], split_dim=1, concat_dim=0), range(3))
    for r, y in enumerate(got):
        assert torch.equal(y, whole[:, 2 * r : 2 * r + 2])


def test_uneven_with_nothing_for_some(run, gradients):
    sends = [[0, 2, 1], [1, 0, 0], [0, 3, 0]]  # row r: sizes that r sends to each rank
    receives = [[row[r] for row in sends] for r in range(3)]
    xs = [[1.0, 2.0, 3.0], [4.0], [5.0, 6.0, 7.0]]
    for sizes in (receives, ["auto"] * 3):

        def call(x, send, receive):
            return dc.all_to_all(x, split_sizes=send, concat_sizes=receive)

        got = run(lambda x, s, c: call(torch.tensor(x), s, c), xs, sends, sizes)
        assert [y.tolist() for y in got] == [[4], [1, 2, 5, 6, 7], [3]]
        found = gradients(lambda x, s, c, w: w * call(x, s, c).sum(), xs, sends, sizes, [1.0, 10.0, 100.0])
        assert found == [[10, 10, 100], [1], [10, 10, 10]]
