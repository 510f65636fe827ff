rule fetch_corpus:
    output:
        f"{DATA}/raw/manifest.json",
    log:
        f"{REPORTS}/logs/fetch-corpus.log",
    conda:
        "../envs/lmperf.yaml"
    resources:
        **JOB,
    params:
        args=arguments(PLAN.fetch),
    shell:
        "python -m lmperf fetch-corpus {params.args} 2> {log:q}"


rule ingest:
    input:
        f"{DATA}/raw/manifest.json",
    output:
        f"{DATA}/shards/manifest.json",
    log:
        f"{REPORTS}/logs/ingest.log",
    conda:
        "../envs/lmperf.yaml"
    resources:
        **JOB,
    params:
        args=arguments(PLAN.ingest),
    shell:
        "python -m lmperf ingest {params.args} 2> {log:q}"


rule tokenize:
    input:
        f"{DATA}/shards/manifest.json",
    output:
        f"{DATA}/tokens/manifest.json",
    log:
        f"{REPORTS}/logs/tokenize.log",
    conda:
        "../envs/lmperf.yaml"
    threads: 2
    resources:
        **JOB,
    params:
        args=arguments(PLAN.tokenize),
    shell:
        "python -m lmperf tokenize {params.args} 2> {log:q}"
