// BullMQ on Redis.

import { load, main } from './protocol.mjs'

const bullmq = await load('bullmq')
const { Queue, Worker } = bullmq.default ?? bullmq
const CONCURRENCY = 100

const connection = (url) => ({ host: new URL(url).hostname, port: Number(new URL(url).port) })

await main({
  package: 'bullmq',
  settings:
    `concurrency ${CONCURRENCY}, removeOnComplete; bulk is addBulk();` +
    ' lockDuration 30 s and stalledInterval 30 s (its defaults)',

  async send(url, bodies) {
    const queue = new Queue('bench', { connection: connection(url) })
    await queue.waitUntilReady()
    for await (const body of bodies) await queue.add('job', { body })
  },

  async bulk(url, bundles) {
    const queue = new Queue('bench', { connection: connection(url) })
    await queue.waitUntilReady()
    for await (const bundle of bundles) {
      await queue.addBulk(bundle.map((body) => ({ name: 'job', data: { body } })))
    }
  },

  async work(url, jobs) {
    const worker = new Worker('bench', async (job) => jobs.run(job.data.body), {
      connection: { ...connection(url), maxRetriesPerRequest: null },
      concurrency: CONCURRENCY,
      removeOnComplete: { count: 0 },
    })
    worker.on('error', console.error)
  },
})
