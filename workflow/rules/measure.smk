# Timed rules take all cores, so that nothing runs beside them, and are never retried: a retried timing is a selection.


rule profile:
    input:
        f"{DATA}/tokens/manifest.json",
    output:
        expand(f"{REPORTS}/{{name}}", name=lab.PROFILE_OUTPUTS),
    log:
        f"{REPORTS}/logs/profile.log",
    retries: 0
    conda:
        "../envs/lmperf.yaml"
    threads: TIMED_THREADS
    resources:
        **TIMED,
    params:
        args=arguments(PLAN.profile),
    shell:
        "python -m lmperf profile {params.args} 2> {log:q}"


rule measure:
    input:
        f"{DATA}/tokens/manifest.json",
    output:
        f"{REPORTS}/sessions/{{session}}.jsonl",
    log:
        f"{REPORTS}/logs/measure.{{session}}.log",
    retries: 0
    conda:
        "../envs/lmperf.yaml"
    threads: TIMED_THREADS
    resources:
        **TIMED,
    params:
        args=lambda wildcards: arguments(PLAN.sessions[wildcards.session]),
    shell:
        "python -m lmperf measure {params.args} 2> {log:q}"


rule train:
    input:
        f"{DATA}/tokens/manifest.json",
    output:
        f"{REPORTS}/quality/{{run}}.json",
    log:
        f"{REPORTS}/logs/train.{{run}}.log",
    conda:
        "../envs/lmperf.yaml"
    resources:
        **JOB,
    params:
        args=lambda wildcards: arguments(PLAN.quality[wildcards.run]),
    shell:
        "python -m lmperf train {params.args} 2> {log:q}"
