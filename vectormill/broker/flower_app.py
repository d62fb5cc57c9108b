"""The Celery app that Flower imports by name: `celery -A vectormill.broker.flower_app flower`."""

from vectormill.broker.app import make_app
from vectormill.processes.logs import JSON, begin_logging
from vectormill.settings import load_settings

_settings = load_settings()
if _settings.log_format == JSON:  # Flower adds no log handler if there is one; its own format is plain text
    begin_logging("flower", _settings.log_level, JSON)
app = make_app(_settings.need("redis_url"))
