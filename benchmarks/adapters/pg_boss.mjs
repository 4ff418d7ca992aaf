// pg-boss on PostgreSQL.

import { load, main } from './protocol.mjs'

const boss = await load('pg-boss')
const PgBoss = boss.default ?? boss.PgBoss
const BATCH = 1000
const POLL = 0.5

const open = async (url) => {
  const queue = new PgBoss({ connectionString: url })
  queue.on('error', console.error)
  await queue.start()
  return queue
}

await main({
  package: 'pg-boss',
  settings:
    `work() with batchSize ${BATCH} and pollingIntervalSeconds ${POLL} (the least it allows); bulk is insert();` +
    ' expireInSeconds 15 min (its default)',

  async setup(url) {
    const queue = await open(url)
    await queue.createQueue('bench')
    await queue.stop({ graceful: false })
  },

  async send(url, bodies) {
    const queue = await open(url)
    for await (const body of bodies) await queue.send('bench', { body })
  },

  async bulk(url, bundles) {
    const queue = await open(url)
    for await (const bundle of bundles) {
      await queue.insert(bundle.map((body) => ({ name: 'bench', data: { body } })))
    }
  },

  async work(url, jobs) {
    const queue = await open(url)
    await queue.work('bench', { batchSize: BATCH, pollingIntervalSeconds: POLL }, async (batch) => {
      for (const job of batch) await jobs.run(job.data.body)
    })
  },
})
