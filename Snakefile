"""Raw text to report.  `snakemake --cores all` makes everything; `snakemake -n` says what a change touches."""

from lmperf import workflow as lab


configfile: f"{workflow.basedir}/config.yaml"


lab.prepare_path()
PLAN = lab.plan_or_exit(config)
DATA, REPORTS = PLAN.data, PLAN.reports
JOB, TIMED = lab.cluster_resources(PLAN.config)
TIMED_THREADS = lab.timed_threads(workflow, PLAN.config)
arguments = lab.arguments_of(PLAN)


wildcard_constraints:
    session="[^/]+",
    run="[^/]+",


include: "workflow/rules/corpus.smk"
include: "workflow/rules/measure.smk"
include: "workflow/rules/report.smk"


rule all:
    default_target: True
    input:
        lab.outputs_of(PLAN),
