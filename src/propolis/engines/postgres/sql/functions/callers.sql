-- The doors for transactions that are not the engine's: those of callers in Python, and of any other language.
--
-- Nobody is notified here unless that is asked for: a commit with a notification waits for every other such commit.
-- The next sweep, of whichever worker, notifies instead.
--
-- Such a transaction may stay open for as long as its caller wants, so it locks nothing that others need who do not want the very
-- same thing: see in_callers_transaction().  And it waits for others no longer than a second.

-- `put`, for connections of any kind: everything is in one text.  Gives what `put` gives.
CREATE FUNCTION put_called(call text) RETURNS TABLE (n integer, there text)
LANGUAGE plpgsql SET search_path FROM CURRENT SET enable_seqscan = off SET jit = off
SET lock_timeout = '800ms' AS $$
DECLARE
    c jsonb := call::jsonb;
    d jsonb := c->'drafts';
    extras jsonb := nullif(c->'extras', 'null');
BEGIN
    PERFORM set_config('propolis.caller', 'yes', true);
    -- Where places may be out of date, or some are taken, ids are looked for one by one.
    IF NOT always_looks_anew()
       OR used_elsewhere(ARRAY(SELECT j->>'id' FROM jsonb_array_elements(d) AS j), moment((c->>'at')::bigint)) <> '{}' THEN
        extras := jsonb_build_object('alike', true, 'each', coalesce(
            extras->'each', (SELECT jsonb_agg('{}'::jsonb) FROM jsonb_array_elements(d)), '[]'));
    END IF;
    IF NOT EXISTS (SELECT FROM installation WHERE id = c->>'installation') THEN
        RAISE EXCEPTION USING errcode = 'PP004', message = 'another installation of propolis', detail = current_database();
    END IF;
    IF NOT (c->>'announced')::boolean THEN
        INSERT INTO unannounced (queue) SELECT DISTINCT j->>'queue' FROM jsonb_array_elements(d) AS j;
    END IF;
    RETURN QUERY SELECT p.n, p.there FROM put(
        (c->>'at')::bigint,
        ARRAY(SELECT j->>'id' FROM jsonb_array_elements(d) AS j),
        ARRAY(SELECT j->>'task' FROM jsonb_array_elements(d) AS j),
        ARRAY(SELECT j->>'queue' FROM jsonb_array_elements(d) AS j),
        ARRAY(SELECT (j->>'priority')::smallint FROM jsonb_array_elements(d) AS j),
        ARRAY(SELECT (j->>'max_crashes')::smallint FROM jsonb_array_elements(d) AS j),
        ARRAY(SELECT decode(j->>'body', 'base64') FROM jsonb_array_elements(d) AS j),
        extras, c->>'token', nullif(c->'batch', 'null'), (c->>'seal')::boolean,
        (c->>'dead_us')::bigint, (c->>'cancelled_us')::bigint) AS p;
END $$;

-- What is wrong with one field of an envelope; NULL if nothing is, or if we do not know the field.
-- docs/wire-format.md has the rules; a worker checks them all again, and the limits of depth as well.
CREATE FUNCTION fault_of(field text, v jsonb) RETURNS text LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    kind text := jsonb_typeof(v);
    word text := v #>> '{}';
    whole boolean := kind = 'number' AND word ~ '^-?[0-9]{1,15}$';
BEGIN
    IF kind = 'null' AND field IN ('due_at', 'expires_in_ms', 'expires_at', 'timeout_ms', 'unique', 'key', 'batch',
                                   'result_ttl_ms', 'on_success', 'on_error', 'on_timeout') THEN
        RETURN NULL;
    END IF;
    RETURN CASE
        WHEN field = 'v' AND v <> '1' THEN 'this schema knows version 1 of the format'
        WHEN field = 'id' AND (kind <> 'string' OR word !~ '^[\x21-\x7e]{1,128}$')
            THEN '1 to 128 visible ASCII characters, without spaces'
        WHEN field = 'task' AND (kind <> 'string' OR word !~ '^[^\s\x01-\x1f\x7f-\x9f]{1,200}$')
            THEN '1 to 200 characters, no white space, no control characters'
        WHEN field = 'queue' AND (kind <> 'string' OR word !~ '^[A-Za-z0-9_:-]{1,128}$')
            THEN 'letters, digits, "_", "-" and ":", at most 128 of them'
        WHEN field = 'args' AND kind <> 'array' THEN 'an array'
        WHEN field IN ('kwargs', 'headers', 'on_success', 'on_error', 'on_timeout') AND kind <> 'object' THEN 'an object'
        WHEN field = 'headers' AND jsonb_path_exists(v, 'strict $.* ? (@.type() <> "string")') THEN 'an object of strings'
        WHEN field = 'priority' AND NOT (whole AND word::bigint BETWEEN -100 AND 100) THEN 'a whole number from -100 to 100'
        WHEN field = 'member' AND NOT (whole AND word::bigint BETWEEN 0 AND 2147483647) THEN 'a whole number from 0'
        WHEN field = 'max_crashes' AND NOT (whole AND word::bigint BETWEEN 1 AND 32767) THEN 'a whole number from 1 to 32767'
        WHEN field IN ('delay_ms', 'expires_in_ms', 'timeout_ms', 'result_ttl_ms')
             AND NOT (whole AND word::bigint BETWEEN 0 AND 3155760000000) THEN 'whole milliseconds, from 0 to 100 years'
        WHEN field IN ('unique', 'key', 'batch') AND (kind <> 'string' OR length(word) NOT BETWEEN 1 AND 512)
            THEN '1 to 512 characters'
        WHEN field = 'unique_until' AND v NOT IN ('"ended"', '"started"') THEN '"ended" or "started"'
        WHEN field = 'chosen' AND kind <> 'boolean' THEN 'true or false'
        WHEN field IN ('due_at', 'expires_at')
             AND (kind <> 'string' OR word !~* '^\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:?\d\d)$')
            THEN 'a time with its offset, such as 2027-01-31T09:00:00Z'
    END;
END $$;

-- Put one job, given as an envelope that `body` spells, in the caller's transaction.
CREATE FUNCTION put_envelope(e jsonb, body text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    t terms := (moment(NULL), 0, 0);
    j job;
    field text;
    fault text;
BEGIN
    PERFORM set_config('propolis.caller', 'yes', true);
    IF octet_length(convert_to(body, 'UTF8')) > 262144 THEN
        PERFORM refuse(format('the job has %s bytes where 262144 is the limit', octet_length(convert_to(body, 'UTF8'))),
                       'store the data elsewhere and pass a reference');
    END IF;
    FOR field IN SELECT jsonb_object_keys(e) LOOP
        fault := fault_of(field, e->field);
        IF fault IS NOT NULL THEN
            PERFORM refuse(format('%s cannot be the "%s" of a job', left((e->field)::text, 100), field), 'It is: ' || fault);
        END IF;
    END LOOP;
    j := drafted(e, t.now_us);
    j.body := convert_to(body, 'UTF8');
    j.due_us := coalesce((extract(epoch FROM (e->>'due_at')::timestamptz) * 1000000)::bigint,
                         t.now_us + coalesce((e->>'delay_ms')::bigint, 0) * 1000);
    j.expires_us := least((extract(epoch FROM (e->>'expires_at')::timestamptz) * 1000000)::bigint,
                          t.now_us + (e->>'expires_in_ms')::bigint * 1000);
    IF NOT (j.due_us BETWEEN -62135596800000000 AND 253402300799999999
            AND coalesce(j.expires_us, 0) BETWEEN -62135596800000000 AND 253402300799999999) THEN
        PERFORM refuse('a time of the job is beyond what clients can show', 'give one in the years 1 to 9999, in UTC');
    END IF;
    field := add_job(t, j, false);
    IF field IS NULL THEN
        PERFORM check_room(t.now_us, ARRAY[j.queue]);
        INSERT INTO unannounced (queue) VALUES (j.queue);
    END IF;
    RETURN coalesce(field, j.id);
END $$;

-- Put one job, given as its envelope: see docs/wire-format.md.  Gives its id, or that of the job in its place.
-- It is stored byte for byte, unless it has no id: then it gets one.
CREATE FUNCTION enqueue_envelope(envelope text) RETURNS text
LANGUAGE plpgsql SET search_path FROM CURRENT
SET lock_timeout = '800ms' AS $$
DECLARE
    e jsonb;
BEGIN
    BEGIN
        e := envelope::jsonb;
    EXCEPTION WHEN invalid_text_representation OR untranslatable_character THEN
        PERFORM refuse('the envelope is not JSON: ' || sqlerrm, 'for a job without arguments write enqueue(''task'', ''[]'')');
    END;
    IF e IS NULL OR jsonb_typeof(e) <> 'object' OR e->>'task' IS NULL THEN
        PERFORM refuse('the envelope names no task', 'give an object with at least a "task": {"task": "mail.send"}');
    END IF;
    IF e->>'id' IS NULL THEN
        e := e || jsonb_build_object('id', new_id());
        envelope := e::text;
    END IF;
    RETURN put_envelope(e, envelope);
END $$;

-- Put one job of a task.  Gives its id, or that of the job in its place.
-- `payload` is the array of its arguments, or an object {"args": [...], "kwargs": {...}} and other fields of the
-- envelope; an option counts instead.  The option `notify` wakes idle workers at the commit.
CREATE FUNCTION enqueue_task(task text, payload jsonb, options jsonb) RETURNS text
LANGUAGE plpgsql SET search_path FROM CURRENT SET timezone = 'UTC'
SET lock_timeout = '800ms' AS $$
DECLARE
    known text[] := '{v,id,task,queue,args,kwargs,priority,delay_ms,due_at,expires_in_ms,expires_at,timeout_ms,chosen,unique,
                     unique_until,key,batch,member,max_crashes,result_ttl_ms,on_success,on_error,on_timeout,headers}';
    offered text[] := '{queue,delay,due_at,priority,job_id,unique_key,unique_until,limit_key,expires_in,expires_at,timeout,
                       result_ttl,max_crashes,batch,headers,notify}';
    e jsonb := CASE jsonb_typeof(payload) WHEN 'array' THEN jsonb_build_object('args', payload) ELSE payload END;
    o jsonb;
    stranger text;
    answer text;
BEGIN
    IF task IS NULL OR payload IS NULL OR jsonb_typeof(e) <> 'object' THEN
        PERFORM refuse('a job needs a task and a payload', 'write enqueue(''mail.send'', ''["ann@example.org"]''), with [] for no arguments');
    ELSIF jsonb_typeof(options) <> 'object' THEN
        PERFORM refuse('the options are no object', 'write {"queue": "mail"}');
    END IF;
    SELECT coalesce(jsonb_object_agg(key, value), '{}') INTO o FROM jsonb_each(options) WHERE value <> 'null';
    SELECT field INTO stranger FROM jsonb_object_keys(e) AS field WHERE field <> ALL (known) LIMIT 1;
    IF stranger IS NOT NULL THEN
        PERFORM refuse(format('the payload has an unknown field "%s"', left(stranger, 100)),
                       'arguments belong into "args" (an array) or "kwargs" (an object)');
    END IF;
    SELECT field INTO stranger FROM jsonb_object_keys(o) AS field WHERE field <> ALL (offered) LIMIT 1;
    IF stranger IS NOT NULL THEN
        PERFORM refuse(format('there is no option "%s"', left(stranger, 100)), 'use one of ' || array_to_string(offered, ', '));
    END IF;
    IF o ?& '{delay,due_at}' THEN
        PERFORM refuse('both a delay and a time are given', 'give one of them');
    END IF;
    e := jsonb_build_object('v', 1, 'id', new_id()) || e || jsonb_strip_nulls(jsonb_build_object(
        'task', task,
        'queue', o->'queue',
        'priority', o->'priority',
        'id', o->'job_id',
        'chosen', CASE WHEN o ? 'job_id' THEN true END,
        'unique', o->'unique_key',
        'unique_until', o->'unique_until',
        'key', o->'limit_key',
        'delay_ms', milliseconds((o->>'delay')::interval),
        'due_at', (o->>'due_at')::timestamptz,
        'expires_in_ms', milliseconds((o->>'expires_in')::interval),
        'expires_at', (o->>'expires_at')::timestamptz,
        'timeout_ms', milliseconds((o->>'timeout')::interval),
        'result_ttl_ms', milliseconds((o->>'result_ttl')::interval),
        'max_crashes', o->'max_crashes',
        'batch', o->'batch')) || CASE WHEN o ? 'headers' THEN jsonb_build_object('headers', o->'headers') ELSE '{}' END;
    answer := put_envelope(e, e::text);
    IF (o->>'notify')::boolean THEN
        PERFORM wake(coalesce(e->>'queue', 'default'));
    END IF;
    RETURN answer;
END $$;
