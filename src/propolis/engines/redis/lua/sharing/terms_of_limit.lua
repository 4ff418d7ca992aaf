-- with: base sharded jobs sharing
-- The limit ARGV[5] holds for ARGV[6] us or until ARGV[7] (both may be ''), says ARGV[8], as JSON, and has the
-- rate ARGV[9] ('': none).
keep_terms(ARGV[5], ARGV[6], ARGV[7], ARGV[8])
keep_rate(ARGV[5], ARGV[9])
wake_for(ARGV[5]:match('^limit:(%a+):(.*)$'))
publish_woken()
return 1
