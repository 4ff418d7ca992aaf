-- with: base
-- All rules as they are kept: kind:scope:name and n; and all caps: queue and n.
return {redis.call('HGETALL', base .. 'rules'), redis.call('HGETALL', base .. 'caps')}
