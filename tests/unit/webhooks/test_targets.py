import pytest

from vectormill.domain.errors import InvalidOption
from vectormill.webhooks.targets import check_url, refuse_address


@pytest.mark.parametrize(
    ("address", "is_public", "is_private"),
    [
        ("93.184.216.34", True, False),
        ("2606:2800:220:1:248:1893:25c8:1946", True, False),
        ("10.0.0.1", False, True),
        ("172.16.5.4", False, True),
        ("192.168.1.1", False, True),
        ("100.64.0.1", False, True),  # behind a carrier's NAT
        ("127.0.0.1", False, True),
        ("127.8.8.8", False, True),
        ("::1", False, True),
        ("fc00::1", False, True),
        ("::ffff:10.0.0.1", False, True),  # IPv4 in IPv6's clothes
        ("::ffff:93.184.216.34", True, False),
        ("64:ff9b::7f00:1", False, True),  # through a NAT64 gateway
        ("2002:7f00:1::", False, True),  # 6to4
        # Nobody allows these.
        ("169.254.169.254", False, False),
        ("::ffff:169.254.169.254", False, False),
        ("64:ff9b::a9fe:a9fe", False, False),
        ("2002:a9fe:a9fe::", False, False),
        ("fe80::1", False, False),
        ("fe80::1%eth0", False, False),
        ("fd00:ec2::254", False, False),
        ("168.63.129.16", False, False),
        ("100.100.100.200", False, False),
        ("0.0.0.0", False, False),  # on Linux this machine
        ("::", False, False),
        ("224.0.0.1", False, False),
        ("not an address", False, False),
    ],
)
def test_an_address_is_public_or_private_or_nobodys(address: str, is_public: bool, is_private: bool) -> None:
    reason = refuse_address(address, allows_private=False)
    assert (reason is None) == is_public
    assert (refuse_address(address, allows_private=True) is None) == (is_public or is_private)
    if is_private:
        assert reason is not None
        assert "VECTORMILL_WEBHOOK_PRIVATE_TARGETS=true" in reason


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("ftp://example.com/", "must start with https://"),
        ("https://", "name a host"),
        ("example.com/hook", "must start with https://"),
        ("https://user:secret@example.com/", "no user and password"),
        ("https://example.com/#here", "fragment"),
        ("https://example.com:99999/", "not a URL"),
        ("https://[::1/", "not a URL"),
        ("https://exämple.com/", "characters"),
        ("https://example.com/a b", "characters"),
        ("https://example.com/\n", "characters"),
        ("https://example.com/" + "a" * 2048, "2,048"),
        ("http://127.0.0.1:8000/", "VECTORMILL_WEBHOOK_PRIVATE_TARGETS"),
        ("http://[::1]/", "VECTORMILL_WEBHOOK_PRIVATE_TARGETS"),
        ("http://localhost./", "VECTORMILL_WEBHOOK_PRIVATE_TARGETS"),
        ("http://169.254.169.254/latest/meta-data", "secrets"),
    ],
)
def test_a_url_that_can_lead_to_nothing_good_is_refused_with_its_reason(url: str, words: str) -> None:
    with pytest.raises(InvalidOption, match=words):
        check_url(url, allows_private=False)


@pytest.mark.parametrize("url", ["https://example.com/hook?team=search", "http://example.com:8080"])
def test_a_public_url_is_taken_as_it_is(url: str) -> None:
    assert check_url(url, allows_private=False) == url


def test_what_a_setting_allows_is_taken() -> None:
    assert check_url("http://localhost:9000/hook", allows_private=True)
    with pytest.raises(InvalidOption, match="secrets"):
        check_url("http://169.254.169.254/", allows_private=True)
