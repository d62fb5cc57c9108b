"""Encode texts with Spark on this machine: `python on_spark.py TEXTS ANSWER`."""

import json
import sys
from pathlib import Path

import pyspark
from pyspark.sql import SparkSession

from vectormill.integrations.spark import embed

OPTIONS = {
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.memory": "600m",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "16",
    "spark.task.cpus": "2",
    "spark.ui.enabled": "false",
}

if __name__ == "__main__":
    texts = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    spark = SparkSession.builder.master("local[2]").config(map=OPTIONS).getOrCreate()
    frame = spark.createDataFrame([(text,) for text in texts], "text string").coalesce(2)
    told = frame.select("text", embed("text", errors=True).alias("made")).collect()
    plain = frame.withColumn("embedding", embed("text")).withColumn("embedding", embed("text")).collect()
    assert frame.where("text = 'no such text'").select(embed("text")).collect() == []
    reasons = [row.made.error for row in told]
    answer = {
        "version": pyspark.__version__,
        "with errors": {
            "texts": [row.text for row in told],
            "vectors": [row.made.embedding for row in told],
            "errors": reasons,
        },
        "plain": {
            "texts": [row.text for row in plain],
            "vectors": [row.embedding for row in plain],
            "errors": reasons,
        },
    }
    spark.stop()
    Path(sys.argv[2]).write_text(json.dumps(answer), encoding="utf-8")
