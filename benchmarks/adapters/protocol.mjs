// What the adapters of all Node peers have in common: the same commands and lines as protocol.py.

import { createRequire } from 'node:module'
import { openSync, writeSync } from 'node:fs'
import { setTimeout as sleep } from 'node:timers/promises'
import path from 'node:path'
import { pathToFileURL } from 'node:url'

const BODY = 300 // bytes of a job's payload
const SLOW = 5 // milliseconds that a job of the crash check takes
const TICK = 500 // milliseconds between two words about progress
const PIPE = openSync(process.env.BENCH_PIPE, 'w')

// Peers live in an environment of their own, and ES modules do not look at NODE_PATH.
const need = createRequire(path.join(process.env.BENCH_ENVIRONMENT, 'package.json'))

export const load = (name) => import(pathToFileURL(need.resolve(name)))

export const version = (name) =>
  need(path.join(process.env.BENCH_ENVIRONMENT, 'node_modules', name, 'package.json')).version

const emit = (facts) => writeSync(PIPE, JSON.stringify(facts) + '\n')

const monotonic = () => process.hrtime.bigint()

const seconds = () => Number(monotonic()) / 1e9

const cpuSeconds = () => {
  const { user, system } = process.cpuUsage()
  return (user + system) / 1e6
}

const makeBody = (number) => `${number}|${monotonic()}|`.padEnd(BODY, 'x')

class Bodies {
  constructor(options, size) {
    this.options = { first: 0, seconds: 3600, ...options }
    this.size = size
    this.sent = 0
  }

  more() {
    if (this.sent === 0) {
      this.began = seconds()
      this.cpu = cpuSeconds()
    }
    this.ended = seconds()
    return this.sent + this.size <= this.options.count && this.ended - this.began < this.options.seconds
  }

  body(place = 0) {
    return makeBody(this.options.first + this.sent + place)
  }

  tell() {
    emit({ sent: this.sent, seconds: this.ended - this.began, cpu: cpuSeconds() - this.cpu })
  }
}

class Singles extends Bodies {
  async *[Symbol.asyncIterator]() {
    const [least, most] = this.options.pause ?? [0, 0]
    while (this.more()) {
      if (most) await sleep(1000 * (least + Math.random() * (most - least)))
      yield this.body()
      this.sent += 1
    }
  }
}

class Bundles extends Bodies {
  async *[Symbol.asyncIterator]() {
    while (this.more()) {
      yield Array.from({ length: this.size }, (_, place) => this.body(place))
      this.sent += this.size
    }
  }
}

class Jobs {
  constructor(options) {
    this.total = options.count ?? 0
    this.done = 0
    this.task = options.task
    this.run = { noop: this.noop, latency: this.latency, slow: this.slow }[options.task].bind(this)
    process.stdin.on('end', () => process.exit(0)).resume() // no worker is left behind
    if (this.task === 'noop') setInterval(() => this.done && this.mark(), TICK)
  }

  noop() {
    this.done += 1
    if (this.done === 1 || this.done === this.total) this.mark()
  }

  latency(body) {
    const now = monotonic()
    const [number, sent] = body.split('|')
    emit({ number: Number(number), latency: Number(now - BigInt(sent)) / 1e6 })
  }

  async slow(body) {
    const number = Number(body.split('|')[0])
    emit({ started: number })
    await sleep(SLOW)
    emit({ finished: number })
  }

  mark() {
    const rss = process.memoryUsage.rss() / 1024 ** 2
    emit({ done: this.done, at: seconds(), cpu: cpuSeconds(), rss })
  }
}

// peer: {package, settings, setup(url)?, send(url, bodies), bulk(url, bundles)?, work(url, jobs)}
export async function main(peer) {
  const [command, text] = process.argv.slice(2)
  const options = JSON.parse(text)
  switch (command) {
    case 'about':
      emit({
        version: version(peer.package),
        settings: peer.settings,
        bulk: Boolean(peer.bulk),
        needs_worker_first: false,
      })
      break
    case 'setup':
      await peer.setup?.(options.url)
      emit({ ready: true })
      break
    case 'send':
    case 'latency': {
      const bodies = new Singles(options, 1)
      await peer.send(options.url, bodies)
      bodies.tell()
      break
    }
    case 'bulk': {
      const bundles = new Bundles(options, Math.min(options.size ?? 1000, options.count))
      await peer.bulk(options.url, bundles)
      bundles.tell()
      break
    }
    case 'work':
      await peer.work(options.url, new Jobs(options))
      return // until killed
    default:
      throw new Error(`no command ${command}: see adapters/protocol.py`)
  }
  process.exit(0)
}
