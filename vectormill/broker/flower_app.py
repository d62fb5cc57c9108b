"""The Celery app as Flower finds it by name (`celery -A vectormill.broker.flower_app`)."""

from vectormill.broker.app import make_app
from vectormill.domain.errors import ConfigurationError
from vectormill.settings import load_settings

_settings = load_settings()
if _settings.redis_url is None:
    raise ConfigurationError(
        "Set VECTORMILL_REDIS_URL, or use `vectormill up`, which starts a Redis of its own."
    )
app = make_app(_settings.redis_url)
