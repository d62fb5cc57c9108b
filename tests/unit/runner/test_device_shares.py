"""How long a batch took, where several are computed side by side."""

from worker.runner.stream import DeviceShares


def test_a_stream_that_computes_alone_has_the_whole_device_whatever_others_could_do() -> None:
    now = 10.0
    shares = DeviceShares(lambda: now)
    begun = shares.enter()
    now = 12.0
    assert shares.leave() - begun == 2.0


def test_streams_side_by_side_share_the_time_and_together_have_all_of_it() -> None:
    now = 0.0
    shares = DeviceShares(lambda: now)
    first = shares.enter()
    now = 1.0  # alone so far
    second = shares.enter()
    now = 3.0  # two seconds together
    first_seconds = shares.leave() - first
    now = 4.0  # the second alone
    second_seconds = shares.leave() - second
    assert (first_seconds, second_seconds) == (2.0, 2.0)
    now = 9.0  # nobody
    third = shares.enter()
    now = 9.5
    assert shares.leave() - third == 0.5
