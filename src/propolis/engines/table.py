"""The table of our engines."""

from __future__ import annotations

# By the scheme of its URL, the module and the function that make an engine.
ENGINES = {
    "memory": "propolis.engines.memory.engine:from_url",
    "postgres": "propolis.engines.postgres.engine:from_url",
    "postgresql": "propolis.engines.postgres.engine:from_url",
    "redis": "propolis.engines.redis.engine:from_url",
    "redis+cluster": "propolis.engines.redis.shards.engine:from_url",
    "redis+sentinel": "propolis.engines.redis.engine:from_url",
    "redis+unix": "propolis.engines.redis.engine:from_url",
    "rediss": "propolis.engines.redis.engine:from_url",
    "rediss+cluster": "propolis.engines.redis.shards.engine:from_url",
    "rediss+sentinel": "propolis.engines.redis.engine:from_url",
    "sqlite": "propolis.engines.sqlite.engine:from_url",
}

EXTRAS = {"asyncpg": "postgres", "hiredis": "redis"}  # of our own package, by the module that they bring
