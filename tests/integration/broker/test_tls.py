"""Between machines Redis and Postgres are reached by TLS, and only if their certificates are the expected ones."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from kombu.exceptions import OperationalError as BrokerAway
from redis import Redis
from redis.exceptions import ConnectionError as RedisAway
from sqlalchemy import make_url
from sqlalchemy.exc import OperationalError

from tests.tls import CERTIFICATE, tls_front
from vectormill.broker.app import ENCODE_CHUNK, make_app, queue_of
from vectormill.broker.queues import QueueReader
from vectormill.db.session import make_engine


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    path = tmp_path / "root.pem"
    path.write_text(CERTIFICATE)
    return path


@pytest.fixture
def tls_redis_url(redis_url: str, tmp_path: Path) -> Iterator[str]:
    parts = urlsplit(redis_url)
    assert parts.hostname
    assert parts.port
    with tls_front(tmp_path, (parts.hostname, parts.port)) as port:
        yield f"rediss://:{parts.password}@localhost:{port}/0"


@pytest.fixture
def tls_database_url(database_url: str, tmp_path: Path) -> Iterator[str]:
    url = make_url(database_url)
    socket = f"{url.query['host']}/.s.PGSQL.{url.query.get('port', 5432)}"
    with tls_front(tmp_path, socket, is_postgres=True) as port:
        outside = url.difference_update_query(["host", "port"]).set(host="localhost", port=port)
        yield outside.render_as_string(hide_password=False)


def test_messages_reach_a_redis_whose_certificate_is_signed_by_the_given_root(
    tls_redis_url: str, certificate: Path
) -> None:
    url = f"{tls_redis_url}?ssl_ca_certs={certificate}"
    with make_app(url) as app:
        app.send_task(ENCODE_CHUNK, queue=queue_of("tls"))
    with closing(QueueReader(url)) as reader:
        assert reader.count_messages([queue_of("tls")]) == 1
    with Redis.from_url(url) as redis:
        redis.delete(queue_of("tls"))


def test_no_message_goes_to_a_redis_whose_certificate_nobody_trusts(tls_redis_url: str) -> None:
    with make_app(tls_redis_url) as app, pytest.raises(BrokerAway, match="CERTIFICATE_VERIFY_FAILED"):
        app.send_task(ENCODE_CHUNK, queue=queue_of("tls"))
    with (
        closing(QueueReader(tls_redis_url)) as reader,
        pytest.raises(RedisAway, match="CERTIFICATE_VERIFY_FAILED"),
    ):
        reader.count_messages([queue_of("tls")])


def test_who_wants_no_check_of_a_redis_says_so(tls_redis_url: str) -> None:
    with make_app(f"{tls_redis_url}?ssl_cert_reqs=none") as app:
        app.send_task(ENCODE_CHUNK, queue=queue_of("tls"))
    with Redis.from_url(f"{tls_redis_url}?ssl_cert_reqs=none") as redis:
        assert redis.delete(queue_of("tls")) == 1


def test_the_query_of_the_database_s_url_says_how_its_certificate_is_checked(
    tls_database_url: str, certificate: Path, tmp_path: Path
) -> None:
    checked = f"{tls_database_url}?sslmode=verify-full&sslrootcert="
    engine = make_engine(f"{checked}{certificate}", application_name="test")
    with engine.connect() as connection:
        driver = connection.connection.driver_connection
        assert driver is not None
        assert driver.pgconn.ssl_in_use
    engine.dispose()
    with pytest.raises(OperationalError, match="does not exist"):
        make_engine(f"{checked}{tmp_path}/none.pem", application_name="test").connect()
    with pytest.raises(OperationalError, match="certificate verify failed"):
        make_engine(f"{checked}system", application_name="test").connect()
