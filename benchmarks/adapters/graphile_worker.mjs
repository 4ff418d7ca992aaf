// graphile-worker on PostgreSQL.

import { load, main } from './protocol.mjs'

const graphile = await load('graphile-worker')
const { run, makeWorkerUtils, Logger } = graphile.default ?? graphile

const logger = new Logger(() => () => {})
const worker = {
  concurrentJobs: 24,
  maxPoolSize: 26,
  pollInterval: 2000,
  completeJobBatchDelay: 0,
  failJobBatchDelay: 0,
  localQueue: { size: 500 },
  logger,
}

await main({
  package: 'graphile-worker',
  settings:
    'batching as the descriptions of its options advise: concurrentJobs 24, localQueue.size 500, completeJobBatchDelay 0; bulk is addJobs()',

  async setup(url) {
    const utils = await makeWorkerUtils({ connectionString: url, logger })
    await utils.migrate()
    await utils.release()
  },

  async send(url, bodies) {
    const utils = await makeWorkerUtils({ connectionString: url, logger })
    for await (const body of bodies) await utils.addJob('job', { body })
  },

  async bulk(url, bundles) {
    const utils = await makeWorkerUtils({ connectionString: url, logger })
    for await (const bundle of bundles) {
      await utils.addJobs(bundle.map((body) => ({ identifier: 'job', payload: { body } })))
    }
  },

  async work(url, jobs) {
    const runner = await run({
      preset: { worker: { ...worker, connectionString: url } },
      taskList: { job: ({ body }) => jobs.run(body) },
    })
    await runner.promise
  },
})
