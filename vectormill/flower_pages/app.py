"""The Celery app as Flower finds it by name (`celery -A vectormill.flower_pages.app`), with our page added to Flower's.

Flower reads its handlers and settings when it starts, after this module was imported.
"""

from flower.urls import handlers
from flower.urls import settings as flower_settings

from vectormill.broker.app import make_app
from vectormill.domain.errors import ConfigurationError
from vectormill.flower_pages.backlog import BacklogReader
from vectormill.flower_pages.pages import add_backlog
from vectormill.processes.logs import JSON, begin_logging
from vectormill.settings import load_settings

_settings = load_settings()
if _settings.redis_url is None:
    raise ConfigurationError(
        "Set VECTORMILL_REDIS_URL, or use `vectormill up`, which starts a Redis of its own."
    )
if _settings.log_format == JSON:  # Flower makes no handler where there is one; its own text is for people
    begin_logging("flower", _settings.log_level, JSON)
app = make_app(_settings.redis_url)
add_backlog(
    handlers,
    flower_settings,
    BacklogReader(_settings.database_url),
    console_url=_settings.console_url,
    api_port=_settings.api_port,
)
