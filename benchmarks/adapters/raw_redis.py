"""The least that a queue with leases must do on Redis: bodies in a hash by id, bundles of 100.

One script settles a bundle and leases the next.  The connection is a socket and hiredis' parser.
No retries, priorities, delays, results or history.
"""

from __future__ import annotations

import socket
import time
from typing import Any
from urllib.parse import urlsplit

import hiredis

from adapters.protocol import Bodies, BulkPeer, Bundles, Jobs, main

PUT = """
local first = redis.call('INCRBY', 'raw:id', #ARGV) - #ARGV
for place, body in ipairs(ARGV) do
    redis.call('HSET', 'raw:body', first + place, body)
    redis.call('LPUSH', 'raw:ready', first + place)
end
return #ARGV
"""
EXCHANGE = """
-- ARGV: how many to lease, then the ids that are done.
if #ARGV > 1 then
    redis.call('ZREM', 'raw:running', unpack(ARGV, 2))
    redis.call('HDEL', 'raw:body', unpack(ARGV, 2))
end
local ids = redis.call('RPOP', 'raw:ready', ARGV[1])
if not ids then return {} end
local until_ = redis.call('TIME')[1] + 15
local scores = {}
for place, id in ipairs(ids) do
    scores[2 * place - 1] = until_
    scores[2 * place] = id
end
redis.call('ZADD', 'raw:running', unpack(scores))
return {ids, redis.call('HMGET', 'raw:body', unpack(ids))}
"""
REAP = """
local late = redis.call('ZRANGEBYSCORE', 'raw:running', '-inf', redis.call('TIME')[1])
for _, id in ipairs(late) do
    redis.call('ZREM', 'raw:running', id)
    redis.call('RPUSH', 'raw:ready', id)
end
return #late
"""
BUNDLE = "100"
IDLE = 0.0005


class Connection:
    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._socket = socket.create_connection((parts.hostname, parts.port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._reader = hiredis.Reader()

    def call(self, *words: Any) -> Any:
        self._socket.sendall(hiredis.pack_command(words))
        while (answer := self._reader.gets()) is False:
            self._reader.feed(self._socket.recv(1 << 17))
        if isinstance(answer, hiredis.HiredisError):
            raise answer
        return answer

    def script(self, text: str) -> Any:
        return self.call("SCRIPT", "LOAD", text)


class RawRedis(BulkPeer):
    distribution = "hiredis"
    settings = f"hiredis on its own socket, bundles of 100, lease 15 s; looks again after {IDLE} s when empty"

    def send(self, bodies: Bodies) -> None:
        connection = Connection(self.url)
        put = connection.script(PUT)
        for body in bodies:
            connection.call("EVALSHA", put, "0", body)

    def bulk(self, bundles: Bundles) -> None:
        connection = Connection(self.url)
        put = connection.script(PUT)
        for bundle in bundles.lists():
            connection.call("EVALSHA", put, "0", *bundle)

    def work(self, jobs: Jobs) -> None:
        connection = Connection(self.url)
        exchange, reap = connection.script(EXCHANGE), connection.script(REAP)
        done: list[bytes] = []
        reaped = 0.0
        while True:
            if time.monotonic() - reaped > 1:
                connection.call("EVALSHA", reap, "0")
                reaped = time.monotonic()
            answer = connection.call("EVALSHA", exchange, "0", BUNDLE, *done)
            if not answer:
                done = []
                time.sleep(IDLE)
                continue
            done, found = answer
            for body in found:
                jobs.run(body.decode())


if __name__ == "__main__":
    main(RawRedis)
