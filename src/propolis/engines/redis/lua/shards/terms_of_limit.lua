-- with: base sharded jobs sharing
-- The limit ARGV[5] holds for ARGV[6] us or until ARGV[7] (both may be ''), and says ARGV[8], as JSON.
keep_terms(ARGV[5], ARGV[6], ARGV[7], ARGV[8])
wake_for(ARGV[5]:match('^limit:(%a+):(.*)$'))
publish_woken()
return 1
