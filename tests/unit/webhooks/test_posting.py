"""One attempt: it connects to the address that was judged, ends in its time, follows nothing."""

import asyncio
import contextlib
import socket
import threading
from collections import Counter
from collections.abc import Callable, Sequence

import httpx
import pytest
from standardwebhooks import WebhookVerificationError

from tests.webhook_receiver import receiving
from vectormill.domain.errors import InvalidOption
from vectormill.webhooks.posting import CheckedTransport, Poster, Resolve, resolve
from vectormill.webhooks.webhook import Posting, Reply, check_url, make_secret, refuse_address

SECRETS = [make_secret(), make_secret()]
PUBLIC = "93.184.216.34"


def posting(url: str, secrets: Sequence[str] = SECRETS) -> Posting:
    return Posting(1, "msg_1", '{"type":"job.completed"}', url, secrets)


def post(url: str, *, allows_private: bool = True, seconds: float = 30, names: Resolve = resolve) -> Reply:
    return asyncio.run(Poster(seconds, allows_private=allows_private, resolve=names).post(posting(url)))


def answering(*answers: Sequence[str]) -> tuple[Resolve, list[str]]:
    """A name server that answers one after the other, and what it was asked."""
    left, asked = list(answers), list[str]()

    async def look_up(host: str, port: int) -> Sequence[str]:
        asked.append(f"{host}:{port}")
        return left.pop(0)

    return look_up, asked


NUM_HANGING = 64  # more names than the default executor of asyncio has threads


def test_a_name_whose_server_hangs_delays_nobody_else_and_no_end_of_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: Counter[str] = Counter()
    is_over = threading.Event()

    def look_up(host: str, port: int, *_: object, **__: object) -> list[tuple[object, ...]]:
        asked[host] += 1
        if host.startswith("hangs"):
            is_over.wait(60)
        if host == "nowhere.test":
            raise socket.gaierror("no such name")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (PUBLIC, port))] * 2

    async def ask_all() -> list[asyncio.Task[Sequence[str]]]:
        hanging = [asyncio.create_task(resolve(f"hangs{number}.test", 443)) for number in range(NUM_HANGING)]
        again = [asyncio.create_task(resolve("hangs0.test", 443)) for _ in range(2)]
        assert await asyncio.wait_for(resolve("healthy.test", 443), 20) == [PUBLIC]
        with pytest.raises(socket.gaierror):
            await asyncio.wait_for(resolve("nowhere.test", 443), 20)
        again[0].cancel()  # an attempt whose time is over takes no name from the others
        for _ in range(3):
            await asyncio.sleep(0)
        assert not hanging[0].done()
        assert asked["hangs0.test"] == 1, "those who ask for one name share its thread"
        return hanging

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    try:
        assert all(task.cancelled() for task in asyncio.run(ask_all()))
    finally:
        is_over.set()
    assert asyncio.run(resolve("hangs0.test", 443)) == [PUBLIC]


def test_a_message_carries_a_signature_by_each_secret() -> None:
    with receiving() as receiver:
        assert post(receiver.url) == Reply(204)
    (message,) = receiver.messages
    for secret in SECRETS:
        assert message.verify(secret) == {"type": "job.completed"}
    with pytest.raises(WebhookVerificationError):
        message.verify(make_secret())
    assert (message.id, message.headers["content-type"]) == ("msg_1", "application/json")


def test_a_private_address_is_not_connected_to_unless_it_is_allowed() -> None:
    with receiving() as receiver:
        reply = post(receiver.url, allows_private=False)
    assert receiver.messages == []
    assert reply.status_code is None
    assert "127.0.0.1 is not a public address. Set VECTORMILL_WEBHOOK_PRIVATE_TARGETS=true" in (
        reply.error or ""
    )


def test_a_name_with_one_private_address_among_public_ones_is_refused() -> None:
    names, _ = answering([PUBLIC, "10.0.0.7"])
    reply = post("https://example.com/", allows_private=False, names=names)
    assert (reply.error or "").startswith("10.0.0.7 is not a public address")


def test_a_name_that_is_answered_otherwise_a_moment_later_leads_where_it_led_when_it_was_judged() -> None:
    names, asked = answering([PUBLIC], ["127.0.0.1"])
    seen = []

    class Wire(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            seen.append((request.url.host, request.headers["host"], request.extensions["sni_hostname"]))
            return httpx.Response(200)

    async def send() -> httpx.Response:
        transport = CheckedTransport(Wire(), allows_private=False, resolve=names)
        async with httpx.AsyncClient(transport=transport, trust_env=False) as client:
            return await client.post("https://hooks.example.com:8443/x")

    assert asyncio.run(send()).status_code == 200
    assert seen == [(PUBLIC, "hooks.example.com:8443", "hooks.example.com")]
    assert asked == ["hooks.example.com:8443"]


def test_the_next_address_of_a_name_is_tried_when_the_first_does_not_answer() -> None:
    with receiving() as receiver:
        port = httpx.URL(receiver.url).port
        names, _ = answering(["127.0.0.2", "127.0.0.1"])  # the receiver listens on the second alone
        assert post(f"http://hooks.test:{port}/x", names=names) == Reply(204)
    assert receiver.messages[0].headers["host"] == f"hooks.test:{port}"


def test_a_redirect_is_a_failure_and_is_not_followed() -> None:
    with receiving() as other, receiving() as receiver:
        receiver.answer = lambda message: (307, {"Location": other.url})
        assert post(receiver.url) == Reply(307)
    assert other.messages == []


def test_a_receiver_may_ask_for_a_longer_pause() -> None:
    with receiving() as receiver:
        receiver.answer = lambda message: (503, {"Retry-After": "120"})
        assert post(receiver.url) == Reply(503, retry_after=120.0)
        receiver.answer = lambda message: (503, {"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"})
        assert post(receiver.url) == Reply(503, retry_after=0.0), "a date that has passed asks for nothing"


@pytest.mark.parametrize("trickle", [b"", b"H"], ids=["silent", "a byte now and then"])
def test_an_attempt_ends_in_its_time_whatever_the_other_side_does(trickle: bytes) -> None:
    is_over = threading.Event()

    def serve(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            while not is_over.wait(0.05):
                connection.sendall(trickle)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=quietly(serve), args=(listener,))
        thread.start()
        reply = post(f"http://127.0.0.1:{listener.getsockname()[1]}/", seconds=1)
        is_over.set()
        thread.join()
    assert reply == Reply(None, "No answer within 1 s.")


def quietly(serve: Callable[[socket.socket], None]) -> Callable[[socket.socket], None]:
    def run(listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            serve(listener)

    return run


def test_a_name_that_leads_nowhere_and_a_port_where_nobody_listens_are_sentences() -> None:
    names, _ = answering([])
    assert (
        post("http://hooks.test/", names=names).error
        == "Cannot resolve host name 'hooks.test': no addresses."
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    assert "connect" in (post(f"http://127.0.0.1:{port}/").error or "").lower()


PUBLIC_ADDRESSES = ("93.184.216.34", "2606:2800:220:1:248:1893:25c8:1946", "::ffff:93.184.216.34")
# Of private networks, of a carrier's NAT, of this machine; plain, mapped into IPv6, through NAT64, by 6to4.
PRIVATE_ADDRESSES = (
    "10.0.0.1", "172.16.5.4", "192.168.1.1", "100.64.0.1", "127.0.0.1", "127.8.8.8", "::1", "fc00::1",
    "::ffff:10.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::",
)  # fmt: skip
# No setting allows these: where clouds tell machines their secrets, and what is the address of no single machine.
REFUSED_ADDRESSES = (
    "169.254.169.254", "::ffff:169.254.169.254", "64:ff9b::a9fe:a9fe", "2002:a9fe:a9fe::", "fe80::1", "fe80::1%eth0",
    "fd00:ec2::254", "168.63.129.16", "100.100.100.200", "0.0.0.0", "::", "224.0.0.1", "not an address",
)  # fmt: skip


def test_an_address_is_public_or_private_or_refused() -> None:
    for address in PUBLIC_ADDRESSES:
        assert refuse_address(address, allows_private=False) is None, address
    for address in PRIVATE_ADDRESSES:
        reason = refuse_address(address, allows_private=False)
        assert "VECTORMILL_WEBHOOK_PRIVATE_TARGETS=true" in (reason or ""), address
        assert refuse_address(address, allows_private=True) is None, address
    for address in REFUSED_ADDRESSES:
        assert refuse_address(address, allows_private=True) is not None, address


def test_a_url_that_can_lead_to_nothing_good_is_refused_with_its_reason() -> None:
    for url, words in (
        ("ftp://example.com/", "must start with https://"),
        ("https://", "name a host"),
        ("example.com/hook", "must start with https://"),
        ("https://user:secret@example.com/", "must not contain a user"),
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
    ):
        with pytest.raises(InvalidOption, match=words):
            check_url(url, allows_private=False)
    for url in ("https://example.com/hook?team=search", "http://example.com:8080"):
        assert check_url(url, allows_private=False) == url
    assert check_url("http://localhost:9000/hook", allows_private=True)
    with pytest.raises(InvalidOption, match="secrets"):
        check_url("http://169.254.169.254/", allows_private=True)
