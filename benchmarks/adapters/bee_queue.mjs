// bee-queue on Redis.

import { load, main } from './protocol.mjs'

const { default: Queue } = await load('bee-queue')
const quiet = { getEvents: false, sendEvents: false, storeJobs: false, removeOnSuccess: true }
const CONCURRENCY = 20

await main({
  package: 'bee-queue',
  settings:
    `process(${CONCURRENCY}), getEvents, sendEvents and storeJobs off, removeOnSuccess; bulk is saveAll();` +
    ' stallInterval 5 s (its default), checkStalledJobs(5000) in the worker, as its documentation says',

  async send(url, bodies) {
    const queue = new Queue('bench', { redis: url, isWorker: false, ...quiet })
    await queue.ready()
    for await (const body of bodies) await queue.createJob({ body }).save()
  },

  async bulk(url, bundles) {
    const queue = new Queue('bench', { redis: url, isWorker: false, ...quiet })
    await queue.ready()
    for await (const bundle of bundles) {
      const failures = await queue.saveAll(bundle.map((body) => queue.createJob({ body })))
      if (failures.size) throw [...failures.values()][0]
    }
  },

  async work(url, jobs) {
    const queue = new Queue('bench', { redis: url, ...quiet })
    await queue.ready()
    queue.process(CONCURRENCY, async (job) => jobs.run(job.data.body))
    await queue.checkStalledJobs(5000)
  },
})
