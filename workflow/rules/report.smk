rule compare:
    input:
        expand(f"{REPORTS}/sessions/{{session}}.jsonl", session=PLAN.sessions),
    output:
        f"{REPORTS}/results.parquet",
        expand(f"{REPORTS}/tables/{{name}}", name=lab.RESULTS),
    log:
        f"{REPORTS}/logs/compare.log",
    conda:
        "../envs/lmperf.yaml"
    resources:
        **JOB,
    params:
        args=arguments(PLAN.compare),
    shell:
        "python -m lmperf compare {params.args} 2> {log:q}"


rule ablate:
    input:
        f"{REPORTS}/results.parquet",
        f"{REPORTS}/tables/machine.json",
        expand(f"{REPORTS}/quality/{{run}}.json", run=PLAN.quality),
    output:
        expand(f"{REPORTS}/tables/{{name}}", name=lab.TABLES),
    log:
        f"{REPORTS}/logs/ablate.log",
    conda:
        "../envs/lmperf.yaml"
    resources:
        **JOB,
    params:
        args=arguments(PLAN.ablate),
    shell:
        "python -m lmperf ablate {params.args} 2> {log:q}"


rule report:
    input:
        f"{REPORTS}/results.parquet",
        expand(f"{REPORTS}/tables/{{name}}", name=lab.RESULTS),
        expand(f"{REPORTS}/tables/{{name}}", name=lab.TABLES),
        expand(f"{REPORTS}/{{name}}", name=lab.PROFILE_OUTPUTS),
        f"{DATA}/shards/manifest.json",
        f"{DATA}/tokens/manifest.json",
    output:
        f"{REPORTS}/index.html",
    log:
        f"{REPORTS}/logs/report.log",
    conda:
        "../envs/lmperf.yaml"
    resources:
        **JOB,
    params:
        args=arguments(PLAN.report),
    shell:
        "python -m lmperf report {params.args} 2> {log:q}"
